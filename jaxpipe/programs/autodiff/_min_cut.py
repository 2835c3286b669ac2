"""Chooses the values that one part of a program passes to another, by a minimum cut.

Storing a value costs its bytes. Recomputing it is free if its equation is cheap, and not allowed
otherwise. The cheapest set of values from which cheap equations compute the goals is a minimum
vertex cut between the values that must not be recomputed and the goals.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxpipe.programs.jaxpr import Program, Slice, computed_by, needed_for, operands, variables

from ._policy import is_cheap

# Price per byte of the values that B passes to W. A residual is already in memory and is only read
# again (and stored until W). A value that B computes anyway is written and read. A value that B
# would not compute otherwise also makes B longer, and other stages wait for B.
_RESIDUAL = 2
_COMPUTED = 4
_ADDED = 5

_ENDLESS = math.inf

_LARGEST_FLOW = 2**29
"""SciPy's capacities have 32 bits, and a residual capacity may be the sum of two capacities."""


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
    """Choose the values that B, the input gradient, passes to W, the weight gradient.

    The choice stores the fewest bytes, and nothing expensive runs twice. B may not compute a chosen
    value for its own goals. It is then extended by the equations of this value, which only B runs.

    B must also run the equations with ids in `forced`, and must not compute `weight_only` variables
    for W. Variables that are not `batch_dependent` are computed from the parameters. Returns
    variables of the program and of its bodies, in the program's order.
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
        # W must not recompute the values that B now computes in addition. This may move the cut, so
        # try again.
        part = Slice(part.variables | grown.variables, part.steps | grown.steps)


def smallest_cut(
    program: Program,
    goals: Sequence[Any],
    batch_dependent: Set[Any],
    computed: Set[Any],
    price: Callable[[Any, int], float],
) -> tuple[list[Any], float]:
    """Find the cheapest values from which the goals follow without expensive recomputation.

    Only `batch_dependent` values are stored, and `computed` values are only recomputed if that is
    cheap. `price` takes a variable and its bytes, and is infinite for values that cannot be stored.
    Returns `(variables in the program's order, their price)`.
    """
    # The cut is ordered like the program: sets have no order, and all processes must lower the same
    # program.
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
    """Yield each value of a part and its operands, or None if it must not be recomputed."""
    for i, eqn in enumerate(program.eqns):
        if id(eqn) not in part.steps:
            continue
        if i in program.scans:
            scan = program.scans[i]
            # The carry of a step is the initial value or the previous step's output.
            yield from ((v, [x]) for x, v in (*scan.fixed, *scan.sliced, *scan.stacked))
            yield from (
                (v, [c.initial, c.output]) for c in scan.carried for v in (c.inner, c.result)
            )
            yield from _origins(scan.body, part, computed)
            continue
        for results, used in operands(eqn):
            yield from ((v, None if v in computed and not is_cheap(eqn) else used) for v in results)


def _num_bytes(program: Program, times: int) -> Iterator[tuple[Any, int]]:
    """Yield the bytes of each value that can be stored; a scan slices values stored outside it."""
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            steps = times * program.scans[i].form.length
            yield from ((c.inner, steps * _size(c.inner)) for c in program.scans[i].carried)
            yield from _num_bytes(program.scans[i].body, steps)
        yield from ((v, times * _size(v)) for v in eqn.outvars)


def _size(var: Any) -> int:
    # At least one byte, so that empty arrays are not stored needlessly.
    return max(1, var.aval.size * var.aval.dtype.itemsize)


def min_cut(
    prices: Mapping[Any, float],
    fixed: Iterable[Any],
    uses: Iterable[tuple[Any, Any]],
    goals: Iterable[Any],
) -> set[Any]:
    """Find the cheapest values that the goals can be computed from.

    `prices` are integers or infinity, and values without a price cannot be stored. Values in
    `fixed` are not recomputed. `uses` are pairs `(operand, value computed from it)`.
    """
    fixed = list(fixed)
    uses = list(uses)
    goals = list(goals)
    if not goals:
        return set()
    values = dict.fromkeys((*fixed, *goals, *(x for pair in uses for x in pair)))
    # `node` is the value before it is stored, `node + 1` the stored value.
    node = {value: 2 * i for i, value in enumerate(values)}
    source = 2 * len(node)
    sink = 2 * len(node) + 1
    finite = {
        value: int(prices[value]) for value in values if prices.get(value, _ENDLESS) < _ENDLESS
    }
    # Sizes are multiples of a common unit, so this is exact unless their sum exceeds 2**29 units.
    # In that case a price is rounded up by at most the sum of all prices divided by 2**29.
    unit = max(1, math.gcd(*finite.values()), -(-sum(finite.values()) // _LARGEST_FLOW))
    units = {value: -(-price // unit) for value, price in finite.items()}
    endless = sum(units.values()) + 1
    capacities = {(node[value], node[value] + 1): units.get(value, endless) for value in values}
    capacities |= {(source, node[value]): endless for value in fixed}
    capacities |= {(node[x] + 1, node[value]): endless for x, value in uses}
    capacities |= {(node[value] + 1, sink): endless for value in goals}
    starts, ends = np.array(list(capacities), np.int32).T  # SciPy 1.14 only accepts int32 indices
    shape = (sink + 1, sink + 1)
    graph = csr_array((np.array(list(capacities.values()), np.int32), (starts, ends)), shape)
    # Of several sets with equal price, the one nearest to the goals leaves the least to recompute.
    # More could flow from these nodes to the goals. They are the goals' side of the cut that is
    # nearest to the goals.
    residual = (graph - maximum_flow(graph, source, sink).flow) > 0
    behind = set(breadth_first_order(residual.T, sink, return_predecessors=False).tolist())
    return {value for value, i in node.items() if i + 1 in behind and i not in behind}
