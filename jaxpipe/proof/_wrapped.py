"""Layers that are those of the user, but for what a proof adds."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpipe._typing import PyTree
from jaxpipe.layers import Layer, PipelineModule


class WrappedLayer(Layer):
    """A layer that does what another does; subclasses change that.

    Args:
        layer: The other layer.
        mark: What distinguishes it from layers that are otherwise equal.
    """

    def __init__(self, layer: Layer, mark: Any) -> None:
        self._layer = layer
        self.class_name, self.arguments = layer.class_name, layer.arguments
        self.identity = layer.identity, mark

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
        return self._layer.init(key, inputs, side=side, given=given)

    def apply(
        self, params: PyTree, collections: Mapping[str, PyTree], inputs: PyTree, **how: Any
    ) -> Any:
        return self._layer.apply(params, collections, inputs, **how)


def wrapped_module(
    module: PipelineModule, wrap: Callable[[int, Layer], WrappedLayer]
) -> PipelineModule:
    """Return a copy of a module whose layers are wrapped, given their index."""
    other = copy.copy(module)
    other.layers = tuple(
        dataclasses.replace(named, layer=wrap(index, named.layer))
        for index, named in enumerate(module.layers)
    )
    return other
