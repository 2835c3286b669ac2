"""The protocol of layers: how to make a layer's variables and how to call it."""

import abc
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.programs.jaxpr import Same

Rngs = Mapping[str, jax.Array]
Applied = tuple[PyTree, dict[str, PyTree], dict[str, PyTree]]
TRAIN_FLAGS: Mapping[str, bool] = {
    "train": True,
    "training": True,
    "is_training": True,
    "is_train": True,
    "train_mode": True,
    "deterministic": False,
    "inference": False,
    "use_running_average": False,
}
"""The names of the standard training flags, each with its value in training."""

STANDARD_ARGUMENTS = (*TRAIN_FLAGS, "rngs")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCall:
    """What one call of a layer gets.

    Attributes:
        inputs: The output of the previous layer.
        side: Side inputs by name.
        params: As made by `Layer.init`.
        collections: As made by `Layer.init`.
        rngs: Random keys by stream, from `layer_rngs`; None if nothing random may happen. If only
            `"params"` is given, the streams that the layer holds are keyed from it, and the layer's
            call gets no keys.
        train: Whether this is training.
    """

    inputs: PyTree
    side: Mapping[str, PyTree]
    params: PyTree = dataclasses.field(default_factory=dict[str, Any])
    collections: Mapping[str, PyTree] = dataclasses.field(default_factory=dict[str, Any])
    rngs: Rngs | None = None
    train: bool = dataclasses.field(default=False, metadata={"static": True})


class Layer(abc.ABC):
    """One layer of the sequential model, whatever kind of object the user gave.

    Variables come in two parts: `params`, which an optimiser updates, and `collections`, state that
    the layer itself changes, such as batch statistics. Both are nested dictionaries with string
    keys.
    """

    class_name: str
    identity: Hashable
    """Equal only for layers with equal code and arguments."""
    arguments: "CallArguments"
    """Arguments of its call other than its inputs."""

    @property
    def holds_streams(self) -> bool:
        """True if it holds its own random streams, and makes keys for streams it is not given."""
        return False

    def takes_flag(self, name: str) -> bool:
        """True if it has a training flag of this name."""
        return name in self.arguments.names

    def with_argument(self, name: str, value: bool) -> "Layer":
        """The same layer with one argument of its call fixed."""
        changed = copy.copy(self)
        changed.arguments = self.arguments.fix(name, value)
        return changed

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """Make the variables; without a method of its own, a layer has none.

        Args:
            key: This layer's own key.
            call: Outside training. Only shapes and dtypes of inputs matter. `params` are those that
                another layer of the same tied key has already made.

        Returns:
            `(params, collections)`; variables may be in boxes of `flax.core.meta` that hold their
            partition metadata.
        """
        del key, call
        return {}, {}

    @abc.abstractmethod
    def apply(self, call: LayerCall) -> Applied:
        """Call the layer.

        Returns:
            `(outputs, collections, aux)`: the outputs, the collections after the call, and the
            layer's reports, at most `{"losses": {name: scalar}, "metrics": {name: scalar}}`.
        """


def named_scalars(label: str, tree: PyTree) -> dict[str, jax.Array]:
    """Reports of a layer, `float32[]` by path joined with slashes; equal names are summed."""
    found: dict[str, jax.Array] = {}
    for path, values in jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, tuple)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for value in values if isinstance(values, tuple) else (values,):
            if jnp.shape(value) != ():
                raise LayerError(
                    f"layer {label} must report scalars, but got {name} of shape "
                    f"{list(jnp.shape(value))}. Report its mean."
                )
            # A module that is called twice sows two values; the sum is what both add to the loss.
            found[name] = found.get(name, 0.0) + jnp.asarray(value, jnp.float32)
    return found


def layer_rngs(key: jax.Array | None) -> Rngs | None:
    """Split a layer's key into the streams that layers ask for."""
    if key is None:
        return None
    # A Linen layer derives any other stream from `"params"`.
    return {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}


def flag_values(flags: Mapping[str, bool], *, train: bool) -> dict[str, Any]:
    """Values of the flags, computed from their values in training."""
    return {name: value if train else not value for name, value in flags.items()}


def identity_of(*parts: Any) -> Hashable:
    """A key that distinguishes layers without tracing them.

    Immutable values are equal if all their contents are. Any other value equals only itself.
    """
    return tuple(map(_identity, parts))


def _identity(value: Any) -> Hashable:
    # Not by `==` and `repr` of whole objects, which need not cover every attribute.
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value), repr(value)  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    if type(value) is tuple:
        return tuple, identity_of(*value)
    if isinstance(value, FrozenDict):
        return FrozenDict, identity_of(*value.items())
    # A mutable object may change after the comparison, so only frozen ones are read.
    is_frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    if isinstance(value, nn.Module) or (is_frozen and not hasattr(value, "__dict__")):
        attributes = {
            field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)
        }
    elif is_frozen:
        attributes = vars(value)
    else:
        return Same(value)
    return type(value), identity_of(*attributes.items())


def equal_or_same(structure: Hashable) -> Hashable:
    """The structure of a built module as part of its key, by identity if it is not hashable."""
    # Arguments are not enough: a constructor may count the layers, and build each one differently.
    try:
        hash(structure)
    except TypeError:
        return Same(structure)
    return structure


def call_of(cls: Any, forward_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The call of a module: `forward_fn`, or else what its class defines, which it must."""
    if forward_fn is not None:
        return forward_fn
    # Not `hasattr`: every class is callable, so `cls.__call__` always exists, as its metaclass's.
    for base in cls.__mro__:
        if "__call__" in vars(base):
            return cls.__call__
    raise LayerError(
        f"a layer's class must have a method __call__(self, inputs), but got {cls.__name__}, which "
        "has none. Define it, or give LayerSpec a forward_fn that calls another method."
    )


# In Flax's norms, the argument `mask` selects the values to average over. A side input of that name
# is a mask for attention or the loss, and would give NaN in a norm wherever it hides all features
# of a position.
_NORMS = ("flax.linen.normalization", "flax.nnx.nn.normalization")


class CallArguments:
    """Arguments of a callable other than its inputs, read once from its signature.

    A callable receives a flag such as `train` or `deterministic`, `rngs` or a side input only if
    its signature names it. `function` is the layer's call, or its spec's `forward_fn`; its first
    `num_leading` parameters (a module, the inputs) are passed by position. Names in `skip` already
    have a value.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        num_leading: int,
        label: str,
        flags: Mapping[str, bool] = TRAIN_FLAGS,
        skip: Collection[str] = (),
    ) -> None:
        self._label = label
        self._flags = flags
        self._fixed: Mapping[str, bool] = {}
        # Already set by the user's `functools.partial`.
        bound = function.keywords if isinstance(function, functools.partial) else ()
        try:
            parameters = list(inspect.signature(function).parameters.values())[num_leading:]
        except (TypeError, ValueError):  # builtins without a signature take only their inputs
            parameters = []
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._parameters = [p for p in parameters if p.kind not in variadic]
        self._skip = {*skip, *bound}
        if getattr(function, "__module__", None) in _NORMS:
            self._skip.add("mask")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(p.name for p in self._parameters)

    def takes(self, name: str) -> bool:
        """True if it receives a side input of this name."""
        return name not in self._skip and any(p.name == name for p in self._parameters)

    def open_switches(self, side: Collection[str]) -> dict[str, bool]:
        """The boolean arguments that nothing sets, with their defaults."""
        known = {*self._flags, *self._skip, *self._fixed, *side}
        return {
            p.name: p.default
            for p in self._parameters
            if isinstance(p.default, bool) and p.name not in known
        }

    def fix(self, name: str, value: bool) -> "CallArguments":
        """The same with one argument fixed to a value."""
        changed = copy.copy(self)
        changed._fixed = {**self._fixed, name: value}
        return changed

    def select(self, call: LayerCall) -> tuple[list[Any], dict[str, Any]]:
        """Pick what the signature names: further positional arguments, and keyword arguments."""
        # A fixed argument comes last, to override the flag or side input of its name.
        flags = flag_values(self._flags, train=call.train)
        offered = {**call.side, **flags, "rngs": call.rngs, **self._fixed}
        # By position where possible, because transformations such as `flax.linen.remat` make only
        # positional arguments static.
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        in_order = True
        gap = []
        for parameter in self._parameters:
            name = parameter.name
            in_order = in_order and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            required = parameter.default is inspect.Parameter.empty
            if required and name not in offered:
                raise self._missing(name, call.side)
            if name not in offered or (name in self._skip and not required):
                # A gap before a later positional argument is filled with None, so that must be the
                # default.
                in_order = in_order and parameter.default is None
                gap.append(None)
            elif in_order:
                args = [*args, *gap, offered[name]]
                gap = []
            else:
                kwargs[name] = offered[name]
        return args, kwargs

    def _missing(self, name: str, side: Mapping[str, PyTree]) -> LayerError:
        return LayerError(
            f"{self._label} must find its argument {name!r} among the side inputs, but got "
            f"side={sorted(side)}. Give the batch a third entry {{{name!r}: array}}, or the "
            "argument a default; if it says whether this is training, write "
            f"LayerSpec(...).train_flag({name!r})."
        )
