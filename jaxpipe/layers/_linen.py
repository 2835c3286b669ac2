"""Flax Linen modules as layers."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError

from ._protocol import Applied, CallArguments, Layer, Rngs, layer_rngs


class LinenLayer(Layer):
    """A Linen module, called by its `__call__` or through a tied layer's `forward_fn`.

    Args:
        module: An unbound module.
        forward_fn: `forward_fn(bound_module, inputs)` in place of `__call__`.

    Raises:
        LayerError: The module is bound to variables.
    """

    def __init__(self, module: nn.Module, forward_fn: Callable[..., Any] | None = None) -> None:
        self.class_name = type(module).__name__
        if module.scope is not None:
            raise LayerError(
                f"a Linen layer must be unbound, but got a bound {self.class_name}. "
                "Put the module itself into the list, and the variables into model_parameters=."
            )
        self._module = module
        self._call = type(module).__call__ if forward_fn is None else forward_fn
        self._arguments = CallArguments(self._call, 2, f"layer {self.class_name}")

    def init(self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree]) -> tuple[PyTree, dict, dict]:
        """See `Layer.init`; partition metadata is unboxed."""
        kwargs = self._arguments.select(rngs=None, train=False, side=side)
        outputs, variables = nn.init_with_output(self._call, self._module)(layer_rngs(key), inputs, **kwargs)
        variables = dict(meta.unbox(variables))
        variables.pop("intermediates", None)
        return outputs, variables.pop("params", {}), variables

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
        """See `Layer.apply`; what the module sows under `"intermediates"` is not kept."""
        kwargs = self._arguments.select(rngs=rngs, train=train, side=side)
        mutable = list(collections) if train else []
        run = nn.apply(self._call, self._module, mutable=mutable)
        outputs, changed = run({"params": params, **collections}, inputs, rngs=rngs, **kwargs)
        return outputs, {**collections, **changed}, {}
