"""Layers whose variables are made in float64.

Where float64 is enabled, some initialisers give float64 by default and others float32, so that the
uses of a tied parameter would no longer agree, and collections would change their dtype.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import Layer, PipelineModule


def wide_module(module: PipelineModule) -> PipelineModule:
    """Return a copy of a module whose layers make their variables in float64."""
    other = copy.copy(module)
    other.layers = tuple(
        dataclasses.replace(named, layer=_Wide(named.layer)) for named in module.layers
    )
    return other


class _Wide(Layer):
    """A layer that makes its variables in float64."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.class_name, self.identity = layer.class_name, (layer.identity, "wide")
        self.arguments = layer.arguments

    @property
    def holds_streams(self) -> bool:
        return self._layer.holds_streams

    def takes_flag(self, name: str) -> bool:
        return self._layer.takes_flag(name)

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

    def apply(
        self, params: PyTree, collections: Mapping[str, PyTree], inputs: PyTree, **how: Any
    ) -> Any:
        return self._layer.apply(params, collections, inputs, **how)


def _widened(x: Any) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(jnp.float64) if is_float and isinstance(x, jax.Array) else x
