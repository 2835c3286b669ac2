"""Flax Linen modules as layers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError

from ._model_axis import unbox
from ._protocol import (
    STANDARD_ARGUMENTS,
    Applied,
    CallArguments,
    Layer,
    Rngs,
    call_of,
    identity_of,
    layer_rngs,
    named_scalars,
)

_REPORTED = ("losses", "metrics")


class LinenLayer(Layer):
    """A Linen module, called by its `__call__` or through a tied layer's `forward_fn`.

    Args:
        module: An unbound module.
        forward_fn: `forward_fn(bound_module, inputs)` in place of `__call__`.

    Raises:
        LayerError: The module is bound to variables, or has no `__call__`.
    """

    def __init__(self, module: nn.Module, forward_fn: Callable[..., Any] | None = None) -> None:
        self.class_name = type(module).__name__
        if module.scope is not None:
            raise LayerError(
                f"a Linen layer must be unbound, but got a bound {self.class_name}. "
                "Put the module itself into the list, and the variables into model_parameters=."
            )
        self._module = module
        self.identity = identity_of(type(module), module, forward_fn)
        self._call = call_of(type(module)) if forward_fn is None else forward_fn
        decided = [f.name for f in dataclasses.fields(module) if getattr(module, f.name, None) is not None]
        skip = [name for name in STANDARD_ARGUMENTS if name in decided]
        self._arguments = CallArguments(self._call, 2, f"layer {self.class_name}", skip)

    def init(
        self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree], given: PyTree | None = None
    ) -> tuple[PyTree, dict, dict]:
        """See `Layer.init`; variables keep the partition metadata that the module gives them."""
        args, kwargs = self._arguments.select(rngs=None, train=False, side=side)
        if given:
            call = nn.apply(self._call, self._module, mutable=DenyList(["intermediates"]))
            outputs, variables = call({"params": given}, inputs, *args, rngs=layer_rngs(key), **kwargs)
        else:
            call = nn.init_with_output(self._call, self._module)
            outputs, variables = call(layer_rngs(key), inputs, *args, **kwargs)
        variables = dict(variables)
        for name in ("intermediates", *_REPORTED):
            variables.pop(name, None)
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
        """See `Layer.apply`; what the module sows under `"losses"` and `"metrics"` is reported, nothing else it sows.

        Raises:
            LayerError: It sows what is no scalar under one of these.
        """
        args, kwargs = self._arguments.select(rngs=rngs, train=train, side=side)
        mutable = [*collections, *_REPORTED] if train else []
        run = nn.apply(self._call, self._module, mutable=mutable)
        outputs, updated = run({"params": params, **collections}, inputs, *args, rngs=rngs, **kwargs)
        changed = dict(unbox(updated))
        reported = {name: named_scalars(self.class_name, changed.pop(name)) for name in _REPORTED if name in changed}
        return outputs, {**collections, **changed}, reported
