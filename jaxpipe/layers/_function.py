"""Plain functions as layers: no parameters, no state."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpipe._typing import PyTree

from ._protocol import TRAIN_FLAGS, Applied, CallArguments, Layer, Rngs, identity_of


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

    def init(
        self,
        key: jax.Array,
        inputs: PyTree,
        *,
        side: Mapping[str, PyTree],
        given: PyTree | None = None,
    ) -> tuple[PyTree, dict[str, Any], dict[str, Any]]:
        """See `Layer.init`; there are no variables."""
        outputs, _, _ = self.apply({}, {}, inputs, rngs=None, train=False, side=side)
        return outputs, {}, {}

    def apply(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        *,
        rngs: Rngs | None,
        train: bool,
        side: Mapping[str, PyTree],
    ) -> Applied:
        """See `Layer.apply`."""
        args, kwargs = self.arguments.select(rngs=rngs, train=train, side=side)
        return self._function(inputs, *args, **kwargs), {}, {}
