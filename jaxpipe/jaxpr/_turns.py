"""Results of a program that leave it in turns, group by group, while the rest of it still runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._program import Program, Values, variables
from ._slice import Slice

Turns = dict[int, Callable[[Values], Values]]
"""By the index of an equation what is done when it has run.

From all values known to those that change.
"""


def turns_of(
    program: Program,
    part: Slice,
    groups: Sequence[Sequence[Any]],
    hand_over: Callable[[Any, jax.Array], jax.Array],
) -> Turns:
    """Hand over each group of results once it is complete, and wait for it before the next but one.

    XLA's scheduler (as of JAX 0.10) leaves collectives on results that nothing else reads for the
    end, one after another and under no computation, and holds the results of all until then. Here
    what is computed after a group is complete waits until the group before it has been handed over:
    a group travels under the computing of the next one, and two of them are held at most.

    Args:
        program: The function.
        part: What of it runs.
        groups: Its results, by what leaves together; those that it does not compute are let be.
        hand_over: Gives what becomes of a result, from its variable and its value.

    Returns:
        For `evaluate`.
    """
    given, last_read = _lifetimes(program, part)
    complete = [
        (max((given[x] for x in group), default=-1), group) for group in _computed(groups, given)
    ]
    turns: Turns = {}
    previous: list[Any] = []
    for at, group in sorted(
        ((at, group) for at, group in complete if group), key=lambda pair: pair[0]
    ):
        live = [
            x
            for x in given
            if given[x] <= at < last_read.get(x, -1) and x not in group and x not in previous
        ]
        turns[at] = _turn(
            group,
            [x for x in live if jnp.issubdtype(x.aval.dtype, jnp.inexact)],
            previous,
            hand_over,
        )
        previous = group
    return turns


def _computed(groups: Sequence[Sequence[Any]], given: dict[Any, int]) -> list[list[Any]]:
    return [[x for x in dict.fromkeys(variables(group)) if x in given] for group in groups]


def _lifetimes(program: Program, part: Slice) -> tuple[dict[Any, int], dict[Any, int]]:
    """The equations that give and that last read each variable, by their indices."""
    given: dict[Any, int] = {}
    last_read: dict[Any, int] = {}
    for i, eqn in enumerate(program.eqns):
        if id(eqn) in part.steps:
            given |= dict.fromkeys((x for x in eqn.outvars if x in part.variables), i)
            last_read |= dict.fromkeys(variables(eqn.invars), i)
    return given, last_read


def _turn(
    group: Sequence[Any],
    live: Sequence[Any],
    previous: Sequence[Any],
    hand_over: Callable[[Any, jax.Array], jax.Array],
) -> Callable[[Values], Values]:
    def settle(values: Values) -> Values:
        changed = {x: hand_over(x, values[x]) for x in group}
        if not previous:
            return changed
        waiting = [*live, *previous]
        return changed | dict(
            zip(waiting, jax.lax.optimization_barrier([values[x] for x in waiting]), strict=True)
        )

    return settle
