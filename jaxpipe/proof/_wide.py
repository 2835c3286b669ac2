"""Layers whose variables are made in float64.

Where float64 is enabled, some initialisers give float64 by default and others float32, so that the
uses of a tied parameter would no longer agree, and collections would change their dtype.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import PipelineModule

from ._wrapped import WrappedLayer, wrapped_module


def wide_module(module: PipelineModule) -> PipelineModule:
    """Return a copy of a module whose layers make their variables in float64."""
    return wrapped_module(module, lambda _, layer: _Wide(layer, "wide"))


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
        outputs, params, collections = self._layer.init(key, inputs, side=side, given=given)
        return outputs, *jax.tree.map(_widened, (params, collections))


def _widened(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float64) if is_float and isinstance(x, jax.Array) else x
