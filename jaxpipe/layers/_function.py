"""Plain functions as layers: no parameters, no state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ._protocol import TRAIN_FLAGS, Applied, CallArguments, Layer, LayerCall, identity_of


class FunctionLayer(Layer):
    """A callable of its inputs, such as `jnp.tanh` or a lambda between two modules."""

    def __init__(
        self, function: Callable[..., Any], flags: Mapping[str, bool] = TRAIN_FLAGS
    ) -> None:
        named = function.func if isinstance(function, functools.partial) else function
        name = getattr(named, "__name__", type(named).__name__)
        self.class_name = "lambda" if name == "<lambda>" else name
        self._function = function
        self.identity = identity_of(function, tuple(flags.items()))
        self.arguments = CallArguments(function, 1, f"layer {self.class_name}", flags)

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`."""
        args, kwargs = self.arguments.select(call)
        return self._function(call.inputs, *args, **kwargs), {}, {}
