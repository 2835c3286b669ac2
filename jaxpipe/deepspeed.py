"""DeepSpeed names without a JAX counterpart, for programs ported from DeepSpeed."""

from jaxpipe.engine.deepspeed import *
from jaxpipe.engine.deepspeed import __all__ as __all__
