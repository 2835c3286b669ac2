"""Values that one part of a program hands to another.

A minimum cut through what the second is computed from.

Holding a value costs its bytes, computing it again costs nothing where its equation is cheap and is
ruled out where it is not. The cheapest set of values from which the goals follow by cheap equations
is a minimum vertex cut between what must not be computed again and the goals.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpipe.jaxpr import Program, Slice, computed_by, needed_for, operands, variables

from ._policy import is_cheap

# Prices of a byte of what B hands to W. A residual is in memory already and is only read again (and
# held on until W); a value that B computes anyway is written and read; one that B would not compute
# lengthens B too, which others wait for.
_RESIDUAL, _COMPUTED, _ADDED = 2, 4, 5

_ENDLESS = math.inf

_LARGEST_FLOW = 2**29
"""scipy's capacities have 32 bits, and a residual capacity may be the sum of two of them."""


def pending_values(
    program: Program,
    input_goals: Sequence[Any],
    weight_goals: Sequence[Any],
    *,
    forced: Set[int],
    batch_dependent: Set[Any],
    weight_only: Set[Any],
    residuals: Set[Any],
) -> list[Any]:
    """Values that B, the backward of the inputs, hands to W, that of the weights.

    The fewest bytes are held, and nothing expensive runs twice. A value may be outside what B
    computes for its own goals. Then B grows, and only B computes what it grew by.

    `forced` are ids of equations that B runs too. Variables that are not `batch_dependent` follow
    from the parameters. B must not compute `weight_only` variables for W, which can read
    `residuals`. The result has variables of the program and of its bodies, in the program's order.
    """
    part = needed_for(program, input_goals, forced=forced)
    while True:
        computed = computed_by(program, part)
        at_hand = {*computed, *program.inputs}

        def price(var: Any, num_bytes: int, at_hand: Set[Any] = at_hand) -> float:
            if var in weight_only and var not in at_hand:
                return _ENDLESS
            return num_bytes * (
                _RESIDUAL if var in residuals else _COMPUTED if var in at_hand else _ADDED
            )

        cut, _ = smallest_cut(program, weight_goals, batch_dependent, computed, price)
        pending = [var for var in cut if var not in residuals]
        grown = needed_for(program, [*input_goals, *pending], forced=forced)
        if grown.steps <= part.steps:
            return pending
        # What B now computes in addition is not to be computed again by W either, which may move
        # the cut: once more.
        part = Slice(part.variables | grown.variables, part.steps | grown.steps)


def smallest_cut(
    program: Program,
    goals: Sequence[Any],
    batch_dependent: Set[Any],
    computed: Set[Any],
    price: Callable[[Any, int], float],
) -> tuple[list[Any], float]:
    """The cheapest values from which others follow without doing anything expensive again.

    Goals are variables of the program and of its bodies, or literals. Only what is
    `batch_dependent` is held, and what is `computed` is computed again only where that is cheap.
    `price` is infinite where a value of so many bytes cannot be held.

    The result is `(variables in the program's order, their price)`. Of several sets with one price
    it is the one nearest to the goals, which leaves the least to compute again.
    """
    # In the program's order, and the cut after it: sets have none, and all processes must lower the
    # same program.
    num_bytes = {var: _size(var) for var in program.inputs} | dict(_num_bytes(program, 1))
    part = needed_for(program, goals)
    prices = {var: price(var, size) for var, size in num_bytes.items()}
    fixed: list[Any] = []
    uses: list[tuple[Any, Any]] = []
    inputs = [(var, None) for var in program.inputs]
    for var, operands_of_var in (*inputs, *_origins(program, part, computed)):
        if var not in part.variables or var not in batch_dependent:
            continue
        if operands_of_var is None:
            fixed.append(var)
        else:
            uses += [(x, var) for x in variables(operands_of_var) if x in batch_dependent]
    found = min_cut(prices, fixed, uses, [x for x in variables(goals) if x in batch_dependent])
    cut = [var for var in num_bytes if var in found]
    return cut, sum(prices[var] for var in cut)


def _origins(
    program: Program, part: Slice, computed: Set[Any]
) -> Iterator[tuple[Any, Sequence[Any] | None]]:
    """Each value of a part with what it is computed from.

    None where it is not to be computed again.
    """
    for i, eqn in enumerate(program.eqns):
        if id(eqn) not in part.steps:
            continue
        if i in program.scans:
            scan = program.scans[i]
            # What a step carries in is the first value or the output of the step before.
            yield from ((v, [x]) for x, v in (*scan.fixed, *scan.sliced, *scan.stacked))
            yield from (
                (v, [c.initial, c.output]) for c in scan.carried for v in (c.inner, c.result)
            )
            yield from _origins(scan.body, part, computed)
            continue
        for results, used in operands(eqn):
            yield from ((v, None if v in computed and not is_cheap(eqn) else used) for v in results)


def _num_bytes(program: Program, times: int) -> Iterator[tuple[Any, int]]:
    """Bytes of each value that can be held; what scans slice is held outside of them."""
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            steps = times * program.scans[i].form.length
            yield from ((c.inner, steps * _size(c.inner)) for c in program.scans[i].carried)
            yield from _num_bytes(program.scans[i].body, steps)
        yield from ((v, times * _size(v)) for v in eqn.outvars)


def _size(var: Any) -> int:
    # At least one, so that an empty array is not held where it need not be.
    return max(1, var.aval.size * var.aval.dtype.itemsize)


def min_cut(
    prices: Mapping[Any, float],
    fixed: Iterable[Any],
    uses: Iterable[tuple[Any, Any]],
    goals: Iterable[Any],
) -> set[Any]:
    """The cheapest values that the goals can be computed from; of several sets the nearest to them.

    `prices` are integers or infinity; what has none cannot be held. Values in `fixed` are not
    computed again. `uses` are pairs `(operand, value computed from it)`.
    """
    fixed, uses, goals = list(fixed), list(uses), list(goals)
    if not goals:
        return set()
    values = dict.fromkeys((*fixed, *goals, *(x for pair in uses for x in pair)))
    # A value before it is held; `node + 1` is the held value.
    node = {value: 2 * i for i, value in enumerate(values)}
    source, sink = 2 * len(node), 2 * len(node) + 1
    finite = {
        value: int(prices[value]) for value in values if prices.get(value, _ENDLESS) < _ENDLESS
    }
    # Sizes are multiples of a common one, so this is exact but for sums above 2**29 of it: there a
    # price is rounded up by at most a part in 2**29 of the sum of all prices.
    unit = max(1, math.gcd(*finite.values()), -(-sum(finite.values()) // _LARGEST_FLOW))
    units = {value: -(-price // unit) for value, price in finite.items()}
    endless = sum(units.values()) + 1
    capacities = {(node[value], node[value] + 1): units.get(value, endless) for value in values}
    capacities |= {(source, node[value]): endless for value in fixed}
    capacities |= {(node[x] + 1, node[value]): endless for x, value in uses}
    capacities |= {(node[value] + 1, sink): endless for value in goals}
    starts, ends = np.array(list(capacities), np.int32).T  # the only indices that SciPy 1.14 takes
    shape = (sink + 1, sink + 1)
    graph = csr_array((np.array(list(capacities.values()), np.int32), (starts, ends)), shape)
    # From these nodes more could flow to the goals: the side of the goals in the cut that is
    # nearest to them.
    residual = (graph - maximum_flow(graph, source, sink).flow) > 0
    behind = set(breadth_first_order(residual.T, sink, return_predecessors=False).tolist())
    return {value for value, i in node.items() if i + 1 in behind and i not in behind}
