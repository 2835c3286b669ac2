"""A layer that does what another does, but for what a subclass changes."""

import copy
from collections.abc import Hashable
from typing import Any

import jax

from jaxpipe._util.typing import PyTree

from ._protocol import Applied, Layer, LayerCall


class WrappedLayer(Layer):
    """A layer that does what another does; subclasses change that."""

    def __init__(self, layer: Layer, mark: Hashable) -> None:
        self._layer = layer
        self.class_name = layer.class_name
        self.arguments = layer.arguments
        # `mark` distinguishes it from layers that are otherwise equal.
        self.identity = layer.identity, mark

    @property
    def holds_streams(self) -> bool:
        """See `Layer.holds_streams`."""
        return self._layer.holds_streams

    def takes_flag(self, name: str) -> bool:
        """See `Layer.takes_flag`."""
        return self._layer.takes_flag(name)

    def with_argument(self, name: str, value: bool) -> Layer:
        """See `Layer.with_argument`."""
        changed = copy.copy(self)
        changed._layer = self._layer.with_argument(name, value)
        changed.arguments = changed._layer.arguments
        return changed

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """See `Layer.init`."""
        return self._layer.init(key, call)

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`."""
        return self._layer.apply(call)
