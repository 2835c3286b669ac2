"""Which parameters are hidden matrices, by what the traced layers compute with them."""

import functools
import operator
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import Path
from jaxpipe.programs.jaxpr import follow, primitives

from ._model_trace import ModelTrace
from ._tree import key_path

_NONE: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class _Flow:
    """What a value is computed from.

    Attributes:
        weights: The parameters, if it is computed from nothing else.
        is_data: Whether it is computed from the layer's inputs.
        is_choice: Whether they decide only by comparisons.
        sources: Features that reach the value without a product with parameters in between.
        last: Parameters of the products that reach it without another such product in between.
        fed: Features that reach these products.
    """

    weights: frozenset[Path] = _NONE
    is_data: bool = False
    is_choice: bool = True
    sources: frozenset[Hashable] = _NONE
    last: frozenset[Path] = _NONE
    fed: frozenset[Hashable] = _NONE

    def __or__(self, other: "_Flow") -> "_Flow":
        is_data = self.is_data or other.is_data
        return _Flow(
            _NONE if is_data else self.weights | other.weights,
            is_data,
            self.is_choice and other.is_choice,
            self.sources | other.sources,
            self.last | other.last,
            self.fed | other.fed,
        )


@dataclass
class _Uses:
    """What layers do with parameters, collected equation by equation.

    `multiplied` are those that features are multiplied with; `others` those of which the inputs
    choose rows, and those that make the model's outputs.
    """

    multiplied: set[Path] = field(default_factory=set[Path])
    others: set[Path] = field(default_factory=set[Path])

    def rule(self, eqn: Any, operands: list[_Flow]) -> list[_Flow]:
        name = eqn.primitive.name
        number = len(eqn.outvars)
        if name in primitives.FORMS and len(operands) == number:
            return [_typed(eqn, i, each) for i, each in enumerate(operands)]
        data, weights = (
            functools.reduce(operator.or_, (x for x in operands if x.is_data == is_data), _Flow())
            for is_data in (True, False)
        )
        # A product with ones and zeros that depend on the inputs chooses rows, too.
        chooses = name in primitives.LOOKUPS and bool(operands[0].weights)
        multiplies = name in primitives.PRODUCTS and bool(weights.weights)
        if data.is_data and (chooses or (multiplies and data.is_choice)):
            self.others |= weights.weights
            return [_Flow(is_data=True, is_choice=False, sources=frozenset(eqn.outvars))] * number
        if data.is_data and multiplies:
            self.multiplied |= weights.weights
            fed = data.sources | data.fed
            return [_Flow(_NONE, True, False, last=weights.weights, fed=fed)] * number
        return [_typed(eqn, i, data | weights) for i in range(number)]


def _typed(eqn: Any, position: int, flow: _Flow) -> _Flow:
    """What is known of a result, given its dtype."""
    result = eqn.outvars[position]
    if not flow.is_data:
        return flow
    if _is(result.aval, jnp.bool_):
        return replace(flow, is_choice=True)
    if _is(result.aval, jnp.inexact) and not any(_is(x.aval, jnp.inexact) for x in eqn.invars):
        # Numbers become features here.
        return replace(flow, sources=flow.sources | {result})
    return flow


def _is(leaf: Any, kind: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, kind)


def hidden_matrices(trace: ModelTrace) -> frozenset[Path]:
    """The matrices that a model multiplies features with, apart from embeddings and output heads.

    Only what the layers compute decides; names and classes do not matter.
    """
    uses = _Uses()
    # Positions in a boundary of the values that reach the model's outputs without a product.
    reaching: set[Hashable] = {*range(len(jax.tree.leaves(trace.boundaries[-1])))}
    shapes: dict[Path, Any] = {}
    # From the last layer, because what reaches the outputs is known there first.
    for index in reversed(range(len(trace.programs))):
        leaves = jax.tree.leaves_with_path(trace.params[index])
        local = [key_path(keys) for keys, _ in leaves]
        paths = [trace.paths[index].paths[path] for path in local]
        shapes |= dict(zip(paths, (leaf for _, leaf in leaves), strict=True))
        inputs = jax.tree.leaves(trace.boundaries[index])
        side = jax.tree.leaves(dict(trace.side))
        flows = [_Flow(frozenset({path})) for path in paths]
        flows += [_Flow()] * len(jax.tree.leaves(trace.collections[index]))
        flows += [_of_input(x, position) for position, x in enumerate(inputs)]
        flows += [_of_input(x, ("side", position)) for position, x in enumerate(side)]
        closed = trace.programs[index]
        outputs = follow(closed.jaxpr, [*flows, _Flow()], uses.rule, _Flow())
        found = [outputs[i] for i in range(len(outputs)) if i in reaching]
        reaching = set()
        for flow in found:
            # A head makes the outputs: nothing from before its product reaches the output beside
            # it, as in a residual connection, and no other product with parameters follows.
            if not flow.sources & flow.fed:
                uses.others |= flow.last
                reaching |= flow.sources
    return frozenset(p for p in uses.multiplied - uses.others if len(shapes[p].shape) == 2)


def _of_input(leaf: Any, source: Hashable) -> _Flow:
    is_feature = _is(leaf, jnp.inexact)
    return _Flow(_NONE, True, _is(leaf, jnp.bool_), frozenset({source} if is_feature else ()))
