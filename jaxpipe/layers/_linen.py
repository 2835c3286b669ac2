"""Flax Linen modules as layers."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList

from jaxpipe._util.mesh import NO_MESH
from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError

from ._protocol import (
    TRAIN_FLAGS,
    Applied,
    CallArguments,
    Layer,
    LayerCall,
    call_of,
    flag_values,
    identity_of,
    layer_rngs,
    named_scalars,
)
from ._sharding import unbox

_REPORTED = ("losses", "metrics")


class LinenLayer(Layer):
    """An unbound Linen module, called by its `__call__` or by `forward_fn(bound_module, inputs)`.

    A training flag is an argument of the module's call, or a boolean field with its default value.
    `given` names the fields that the user set, which keep their values.
    """

    def __init__(
        self,
        module: nn.Module,
        forward_fn: Callable[..., Any] | None = None,
        flags: Mapping[str, bool] = TRAIN_FLAGS,
        given: Collection[str] = (),
    ) -> None:
        self.class_name = type(module).__name__
        if module.scope is not None:
            raise LayerError(
                f"a Linen layer must be unbound, but got a bound {self.class_name}. "
                "Put the module itself into the list, and the variables into model_parameters=."
            )
        self.module = module
        self.forward_fn = forward_fn
        self._call = call_of(type(module), forward_fn)
        fields = {
            f.name: (getattr(module, f.name, None), f.default) for f in dataclasses.fields(module)
        }
        flag_fields = [name for name, (value, _) in fields.items() if isinstance(value, bool)]
        # A field with a common name may be the user's own choice for the model; one that
        # `train_flag` names is always a flag.
        self._fields = {
            name: in_training
            for name, in_training in flags.items()
            if name in flag_fields
            and (
                name not in TRAIN_FLAGS
                or (name not in given and fields[name][0] == fields[name][1])
            )
        }
        """The fields that each call sets."""
        # Flax's `merge_param` refuses a value that is both a field and an argument.
        skip = [name for name in (*flags, "rngs") if fields.get(name, (None,))[0] is not None]
        self.arguments = CallArguments(self._call, 2, f"layer {self.class_name}", flags, skip)
        settings = tuple(flags.items()), tuple(self._fields)
        self.identity = identity_of(type(module), module, forward_fn, settings)

    def takes_flag(self, name: str) -> bool:
        """See `Layer.takes_flag`; a boolean field counts too."""
        return name in self._fields or super().takes_flag(name)

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """See `Layer.init`; variables keep the partition metadata that the module gives them."""
        args, kwargs = self.arguments.select(call)
        module = self._with_flags(train=False)
        rngs = layer_rngs(key)
        with nn.intercept_methods(_without_mesh_in_dense_general):
            if call.params:
                # `nn.init` would make the given parameters again; here the module makes only the
                # others.
                run = nn.apply(self._call, module, mutable=DenyList(["intermediates"]))
                _, made = run({"params": call.params}, call.inputs, *args, rngs=rngs, **kwargs)
            else:
                made = nn.init(self._call, module)(rngs, call.inputs, *args, **kwargs)
        # Reports are values of one call, which no later call reads.
        variables = {name: tree for name, tree in made.items() if name not in _REPORTED}
        return variables.pop("params", {}), variables

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`; reports scalars that the module sows as `"losses"` and `"metrics"`."""
        args, kwargs = self.arguments.select(call)
        # Values sown under other names are dropped, because nothing here reads them.
        mutable = [*call.collections, *_REPORTED] if call.train else []
        run = nn.apply(self._call, self._with_flags(train=call.train), mutable=mutable)
        with nn.intercept_methods(_without_mesh_in_dense_general):
            variables = {"params": call.params, **call.collections}
            outputs, updated = run(variables, call.inputs, *args, rngs=call.rngs, **kwargs)
        changed = dict(unbox(updated))
        reported = {
            name: named_scalars(self.class_name, changed.pop(name))
            for name in _REPORTED
            if name in changed
        }
        return outputs, {**call.collections, **changed}, reported

    def _with_flags(self, *, train: bool) -> nn.Module:
        """The module, with its training flags set."""
        values = flag_values(self._fields, train=train)
        return self.module.clone(**values) if values else self.module


def _without_mesh_in_dense_general(
    call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    """Call a method; calls `nn.DenseGeneral`, which attention uses, without a surrounding mesh."""
    # Each call of `nn.DenseGeneral` also traces its initialiser, which applies the kernel's
    # metadata as a constraint while the kernel is still flat. On a mesh this fails if the metadata
    # names more than two dims, or an axis that is not automatic (Flax 0.12).
    is_meant = isinstance(context.module, nn.DenseGeneral) and context.method_name == "__call__"
    if (
        not is_meant or jax.sharding.get_abstract_mesh().explicit_axes
    ):  # a user's own mesh, on which arrays have sharded types
        return call(*args, **kwargs)
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return call(*args, **kwargs)
