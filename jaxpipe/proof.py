"""`prove`: a proof that a pipeline computes what its layers compute one after another."""

from jaxpipe.tools.prove import *
from jaxpipe.tools.prove import __all__ as __all__
