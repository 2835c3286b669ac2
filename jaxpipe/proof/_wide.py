"""Layers that compute in float64.

A narrower dtype among the arguments of a layer becomes float64, also where it is a default value.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpipe.layers import PipelineModule

from ._arguments import with_arguments

_NARROW = ("bfloat16", "float16", "float32")
_TYPES = [kind for name in _NARROW for kind in (getattr(jnp, name), jnp.dtype(name).type)]


def wide_module(module: PipelineModule) -> PipelineModule:
    """Return a copy of a module whose layers compute in float64."""
    return with_arguments(module, _wide_dtype).replace(compute_dtype="float64", auto_cast=True)


def _wide_dtype(name: str, value: Any) -> Any:
    """Replace a narrower floating-point dtype by float64, and the name of one in a `*dtype*`."""
    if isinstance(value, str):
        # The same words name a precision of products. A dtype that is missed makes no proof wrong:
        # its layer is reported as narrower than float64.
        return "float64" if "dtype" in name and value in _NARROW else value
    if isinstance(value, np.dtype):
        return np.dtype("float64") if value.name in _NARROW else value
    return jnp.float64 if any(value is kind for kind in _TYPES) else value
