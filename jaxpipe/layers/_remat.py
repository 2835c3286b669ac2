"""Recompute of layers in the backward pass.

It applies to groups of layers and to single marked layers, and does not keep their inner
activations.
"""

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.layers import recompute
from jaxpipe.programs.autodiff import without_complex

from ._protocol import Applied, Layer, LayerCall
from ._wrapped import WrappedLayer

Call = Callable[[Any], Any]


class RematMark:
    """Marks a layer as recomputed, with the `jax.checkpoint` policy that says what it keeps.

    Two marks are equal if their policies are the same function or were made in the same way, such
    as two results of `jax.checkpoint_policies.save_only_these_names("a")`. Layers with equal marks
    can therefore be equivalent layers. Complex numbers are always recomputed.
    """

    def __init__(self, policy: Callable[..., Any] | None = None) -> None:
        if policy is not None and not callable(policy):
            raise LayerError(
                f"policy must be a jax.checkpoint policy or None, but got policy={policy!r}. "
                "Use one of jax.checkpoint_policies, such as jax.checkpoint_policies.dots_saveable."
            )
        self.policy = None if policy is None else _Policy(policy)

    def call(self, function: Call, inputs: PyTree) -> PyTree:
        """Call a function of a layer's inputs, recomputing it in the backward pass."""
        # Without a policy only the layer's inputs are kept, stored as `recompute` is configured.
        if self.policy is None:
            return recompute.checkpoint(function, inputs)
        return jax.checkpoint(function, policy=without_complex(self.policy))(inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RematMark) and self.policy == other.policy

    def __hash__(self) -> int:
        return hash(self.policy)

    def __repr__(self) -> str:
        return "remat()" if self.policy is None else f"remat(policy={self.policy!r})"


class _Policy:
    """A policy that equals any other with the same code and the same closed-over values."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._key = _content_key(function)

    def __call__(self, primitive: Any, *args: Any, **params: Any) -> Any:
        return self._function(primitive, *args, **params)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Policy) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function)).partition(".<locals>")[
            0
        ]


def _content_key(value: Any) -> Hashable:
    if isinstance(value, types.FunctionType):
        closure = tuple(_content_key(cell.cell_contents) for cell in value.__closure__ or ())
        defaults = (
            _content_key(value.__defaults__ or ()),
            _content_key(value.__kwdefaults__ or {}),
        )
        # Include the globals: in two modules, the same code may read different values by one name.
        return value.__code__, closure, defaults, id(value.__globals__)
    if isinstance(value, functools.partial):
        return (
            functools.partial,
            _content_key(value.func),
            _content_key(value.args),
            _content_key(value.keywords),
        )
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_content_key, value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_content_key, value))
    if isinstance(value, dict):
        return dict, tuple((key, _content_key(item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError:
        return object, id(value)
    return type(value), value


class RematLayer(WrappedLayer):
    """A layer that recomputes itself in training, with the variables and name of `layer`."""

    def __init__(self, layer: Layer, mark: RematMark) -> None:
        super().__init__(layer, mark)
        self._mark = mark

    def apply(self, call: LayerCall) -> Applied:
        apply = super().apply
        if not call.train:
            return apply(call)
        return self._mark.call(lambda inputs: apply(replace(call, inputs=inputs)), call.inputs)


def chain(
    calls: Sequence[Call],
    interval: int,
    remat: Callable[..., Any],
    marked: Sequence[bool] | None = None,
    may_recompute: Sequence[bool] | None = None,
) -> Call:
    """Chain calls; `remat` recomputes each group of `interval` consecutive calls, with 0 none.

    `remat` has the signature of `jax.checkpoint`, which takes a function and returns one, or of
    `jaxpipe.checkpointing.checkpoint`, which takes a function and its input and calls it.
    `may_recompute` None allows all.
    """

    def compose(group: Sequence[Call]) -> Call:
        def run(x: Any) -> Any:
            for call in group:
                x = call(x)
            return x

        return run

    if interval == 0:
        return compose(calls)
    calls_at_once = _calls_at_once(remat)
    wrapped: list[Call] = []
    for start in range(0, len(calls), interval):
        group_indices = range(len(calls))[start : start + interval]
        unmarked = [i for i in group_indices if marked is None or not marked[i]]
        # As with DeepSpeed's `checkpointable_layers`: if one call may not be recomputed, its whole
        # group is not.
        is_recomputed = may_recompute is None or all(may_recompute[i] for i in unmarked)
        # A marked call recomputes itself, and a `jax.checkpoint` around it would replace the mark's
        # policy. The calls before and after it are recomputed separately.
        for piece in _pieces(group_indices, marked):
            group = compose([calls[i] for i in piece])
            if not is_recomputed or (marked is not None and marked[piece[0]]):
                wrapped.append(group)
            else:
                wrapped.append(functools.partial(remat, group) if calls_at_once else remat(group))
    return compose(wrapped)


def _pieces(indices: Sequence[int], marked: Sequence[bool] | None) -> list[list[int]]:
    """A group cut before and after each marked call."""
    pieces: list[list[int]] = []
    for i in indices:
        alone = marked is not None and (marked[i] or (pieces and marked[pieces[-1][-1]]))
        if alone or not pieces:
            pieces.append([i])
        else:
            pieces[-1].append(i)
    return pieces


def _calls_at_once(remat: Callable[..., Any]) -> bool:
    """True if `remat(function, x)` calls the function, rather than `remat(function)(x)`."""
    try:
        parameters = inspect.signature(remat).parameters.values()
    except (TypeError, ValueError):
        return False
    # Recognised by `*args`, or by a second positional parameter without a default.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty
    ]
    return len(required) > 1 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
