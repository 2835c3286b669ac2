"""Layers that compute in float64, from variables made in it.

A narrower dtype among the arguments of a layer becomes float64, also where it is a default value.
Where float64 is enabled, some initialisers give float64 by default and others float32, so that the
uses of a tied parameter would no longer agree, and collections would change their dtype.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.layers import PipelineModule, WrappedLayer

from ._arguments import with_arguments
from ._wrapped import wrapped_module

_NARROW = ("bfloat16", "float16", "float32")
_TYPES = [kind for name in _NARROW for kind in (getattr(jnp, name), jnp.dtype(name).type)]


def wide_module(module: PipelineModule) -> PipelineModule:
    """Return a copy of a module whose layers compute and make their variables in float64."""
    module = with_arguments(module, _wide_dtype)
    return wrapped_module(module, lambda _, layer: _Wide(layer, "wide"))


def _wide_dtype(name: str, value: Any) -> Any:
    """Replace a narrower floating-point dtype by float64, and the name of one in a `*dtype*`."""
    if isinstance(value, str):
        return "float64" if "dtype" in name and value in _NARROW else value
    if isinstance(value, np.dtype):
        return np.dtype("float64") if value.name in _NARROW else value
    return jnp.float64 if any(value is kind for kind in _TYPES) else value


class _Wide(WrappedLayer):
    """A layer that makes its variables in float64."""

    def init(
        self,
        key: jax.Array,
        inputs: PyTree,
        *,
        side: Mapping[str, PyTree],
        given: PyTree | None = None,
    ) -> tuple[PyTree, dict[str, Any], dict[str, Any]]:
        outputs, params, collections = super().init(key, inputs, side=side, given=given)
        return outputs, *jax.tree.map(_widened, (params, collections))


def _widened(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float64) if is_float and isinstance(x, jax.Array) else x
