"""Passes on results of a program group by group, while the rest of the program still runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._program import Program, Values, variables
from ._slice import Slice

Turns = dict[int, Callable[[Values], Values]]
"""Functions that run after an equation, by the equation's index.

They map all known values to those that change.
"""


def turns_of(
    program: Program,
    part: Slice,
    groups: Sequence[Sequence[Any]],
    hand_over: Callable[[Any, jax.Array], jax.Array],
) -> Turns:
    """Pass on each group of results when it is complete, and finish it before the next but one.

    XLA's scheduler (as of JAX 0.10) delays collectives on results that nothing else reads to the
    end of the program. There they run one after another with no computation to overlap them, and
    all results stay in memory until then. Here, the computation after a group is complete waits
    until the previous group has been passed on. So the computation of the next group overlaps a
    group's collectives, and at most two groups are in memory.

    `hand_over` maps a result's variable and value to the value that replaces it. Results that the
    part does not compute are ignored.
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
    """Return the indices of the equations that compute and that last read each variable."""
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
