"""Which values one part of a program hands to another: a smallest cut through what the second is computed from."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jaxpipe.jaxpr import Program, Slice, computed_by, needed_for, operands, variables

from ._policy import is_cheap

_KEPT, _HANDED, _ADDED = 2, 4, 5
"""Prices of a byte: one that was kept is held and read, one that is handed over is written too; what the first part
would not compute lengthens it."""

_ENDLESS = float("inf")
_SOURCE = "source"


@dataclass(frozen=True)
class Halves:
    """A program to be cut in two.

    Attributes:
        program: The function.
        early: What the first part computes.
        goals: What the second part computes.
        forced: Ids of equations that the first part runs too.
        moving: The variables that depend on a microbatch; what does not is computed from the parameters.
        late: Variables that the first part is not to compute for the second.
        kept: The inputs that the second part can read.
    """

    program: Program
    early: Sequence[Any]
    goals: Sequence[Any]
    forced: Set[int]
    moving: Set[Any]
    late: Set[Any]
    kept: Set[Any]


def frontier(halves: Halves) -> list[Any]:
    """What the first part hands over for the second, so that the fewest bytes are held and nothing dear runs twice.

    It may lie outside of what the first part computes for itself. Then that grows, and what it grew by is to be
    computed there alone.

    Returns:
        Variables of the program and of its bodies, in the program's order.
    """
    first = needed_for(halves.program, halves.early, forced=halves.forced)
    while True:
        handed = _cheapest(halves, computed_by(halves.program, first))
        grown = needed_for(halves.program, [*halves.early, *handed], forced=halves.forced)
        if grown.steps <= first.steps:
            return handed
        first = Slice(first.variables | grown.variables, first.steps | grown.steps)


def _cheapest(halves: Halves, computed: Set[Any]) -> list[Any]:
    at_hand = {*computed, *halves.program.inputs}

    def price(var: Any, num_bytes: int) -> float:
        if var in halves.late and var not in at_hand:
            return _ENDLESS
        return num_bytes * (_KEPT if var in halves.kept else _HANDED if var in at_hand else _ADDED)

    held, _ = smallest_cut(halves.program, halves.goals, halves.moving, computed, price)
    return [var for var in held if var not in halves.kept]


def smallest_cut(
    program: Program, goals: Sequence[Any], moving: Set[Any], computed: Set[Any], price: Callable[[Any, int], float]
) -> tuple[list[Any], float]:
    """The cheapest set of values from which others can be computed without doing anything dear again.

    Args:
        program: The function.
        goals: What is to be computed: variables of it and of its bodies, or literals.
        moving: The variables that depend on a microbatch; whatever does not is not held.
        computed: What has been computed already, and is not computed again unless that is cheap.
        price: What it costs to hold a value of so many bytes; infinity where it cannot be held.

    Returns:
        `(variables of the program and of its bodies in the program's order, their price)`. Where several sets cost the
        same, the one nearest to the goals: it leaves the least to compute again.
    """
    num_bytes = {var: _size(var) for var in program.inputs} | dict(_num_bytes(program, 1))
    second = needed_for(program, goals)
    cut = Cut(lambda var: price(var, num_bytes[var]) if var in num_bytes else _ENDLESS)
    sources = [(var, None) for var in program.inputs]
    for var, others in (*sources, *_origins(program, second, computed)):
        if var not in second.variables or var not in moving:
            continue
        if others is None:
            cut.must_hold(var)
        for x in variables(others or ()):
            if x in moving:
                cut.computed_from(var, x)
    found = cut.cheapest(x for x in variables(goals) if x in moving)
    held = [var for var in num_bytes if var in found]
    return held, sum(price(var, num_bytes[var]) for var in held)


def _origins(program: Program, second: Slice, computed: Set[Any]) -> Iterator[tuple[Any, Sequence[Any] | None]]:
    """What each value of the second part may be computed from; None where it is not to be computed again."""
    for i, eqn in enumerate(program.eqns):
        if id(eqn) not in second.steps:
            continue
        if i in program.scans:
            scan = program.scans[i]
            yield from ((v, [x]) for x, v in (*scan.fixed, *scan.sliced, *scan.stacked))
            yield from ((v, [c.initial, c.output]) for c in scan.carried for v in (c.inner, c.result))
            yield from _origins(scan.body, second, computed)
            continue
        for results, used in operands(eqn):
            yield from ((v, None if v in computed and not is_cheap(eqn) else used) for v in results)


def _num_bytes(program: Program, times: int) -> Iterator[tuple[Any, int]]:
    """What it takes to hold each value that can be held; what scans slice is held outside of them."""
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            steps = times * eqn.params["length"]
            yield from ((c.inner, steps * _size(c.inner)) for c in program.scans[i].carried)
            yield from _num_bytes(program.scans[i].body, steps)
        yield from ((v, times * _size(v)) for v in eqn.outvars)


def _size(var: Any) -> int:
    return max(1, var.aval.size * var.aval.dtype.itemsize)


class Cut:
    """A graph of values, and the cheapest set of them that the rest can be computed from.

    Edmonds and Karp's algorithm, from one goal after another, backwards; of several cheapest sets the one that is
    nearest to the goals.

    Args:
        price: What it costs to hold a value; infinity where it cannot be held.
    """

    def __init__(self, price: Callable[[Any], float]) -> None:
        self._price = price
        self._before: dict[Any, dict[Any, float]] = {}
        """Per node what may still flow into it, by node: a value's node before it is held is `(value, False)`."""

    def must_hold(self, value: Any) -> None:
        """Say that a value is not computed again."""
        self._arc(_SOURCE, self._node(value), _ENDLESS)

    def computed_from(self, value: Any, other: Any) -> None:
        """Say that a value, where it is not held, is computed again from another, among others."""
        self._node(other)
        self._arc((other, True), self._node(value), _ENDLESS)

    def cheapest(self, goals: Iterable[Any]) -> set[Any]:
        """The values to hold so that all goals can be computed."""
        behind: set[Any] = set()
        for goal in goals:
            self._node(goal)
            while True:
                after, reached = self._search((goal, True), behind)
                if not reached:
                    break
                self._push((goal, True), after)
            behind |= after.keys()
        return {value for value, is_held in behind if is_held and (value, False) not in behind}

    def _node(self, value: Any) -> tuple[Any, bool]:
        node = (value, False)
        if node not in self._before:
            self._before[node] = {}
            self._before[value, True] = {}
            self._arc(node, (value, True), self._price(value))
        return node

    def _arc(self, start: Any, end: Any, capacity: float) -> None:
        self._before.setdefault(start, {})
        self._before[end][start] = capacity

    def _search(self, goal: Any, behind: set[Any]) -> tuple[dict[Any, Any], bool]:
        """Nodes from which more can flow to the goal, each with the one after it, until the source is met."""
        after: dict[Any, Any] = {goal: None}
        queue = [goal]
        for node in queue:
            for other, capacity in self._before[node].items():
                if capacity > 0 and other not in after and other not in behind:
                    after[other] = node
                    if other == _SOURCE:
                        return after, True
                    queue.append(other)
        return after, False

    def _push(self, goal: Any, after: dict[Any, Any]) -> None:
        path = [_SOURCE]
        while path[-1] != goal:
            path.append(after[path[-1]])
        arcs = list(zip(path, path[1:], strict=False))
        amount = min(self._before[end][start] for start, end in arcs)
        for start, end in arcs:
            self._before[end][start] -= amount
            self._before[start][end] = self._before[start].get(end, 0.0) + amount
