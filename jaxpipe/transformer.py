"""DeepSpeed's transformer layer, and the `attention` that it and users' own layers can call."""

from jaxpipe.models.transformer import *
from jaxpipe.models.transformer import __all__ as __all__
