"""Numbers the values of a traced program; the same expressions have equal numbers."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    branches_of,
    called_program,
    name_of,
    permutation_of,
)
from ._keys import params_key, value_key
from ._primitives import CASTS, ELEMENTWISE, FILL

Table = dict[Hashable, int]


class _Value(NamedTuple):
    """The number of an array, or of each of its elements.

    Attributes:
        is_everywhere: True if `number` is that of each element: the same expression of scalars, and
            of the elements of `leaf` at the same index. It does not depend on `shape`.
        leaf: The divided array that the value is computed from, or None.
    """

    shape: tuple[int, ...]
    number: int
    is_everywhere: bool
    leaf: Hashable = None


def value_numbers(
    closed: ClosedJaxpr,
    inputs: Sequence[Hashable],
    table: Table | None = None,
    leaves: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
) -> list[int]:
    """Number the results of a traced program: equal for the same expressions of equal inputs.

    `inputs` are identities; those with equal ones count as equal. `table` has the numbers assigned
    so far and is extended; programs that are numbered with the same table can be compared.

    Two programs may hold different elements of an array that is divided, and in different shapes.
    Results that are divided like it have equal numbers only if each element is the same expression
    of elements at its own index and of values that are whole. `leaves` has, for each input and for
    each result, the identity of the array that it is divided like, or None if it is whole.
    """
    table = {} if table is None else table
    jaxpr = closed.jaxpr
    divided, wanted = leaves or ([None] * len(jaxpr.invars), [None] * len(jaxpr.outvars))
    given = [
        _whole(table, var.aval.shape, "input", var.aval, x)
        if leaf is None
        else _Value(var.aval.shape, _number(table, "element", var.aval.dtype, x), True, leaf)
        for var, x, leaf in zip(jaxpr.invars, inputs, divided, strict=True)
    ]
    results = _results(jaxpr, closed.consts, given, table)
    return [_result(table, *each) for each in zip(results, wanted, strict=True)]


def _number(table: Table, *key: Hashable) -> int:
    return table.setdefault(key, len(table))


def _unequal(table: Table) -> int:
    """A number that nothing else has."""
    return _number(table, "unequal", len(table))


def _whole(table: Table, shape: tuple[int, ...], *key: Hashable) -> _Value:
    """A value that no divided array takes part in."""
    return _Value(shape, _number(table, *key), math.prod(shape) == 1)


def _result(table: Table, value: _Value, leaf: Hashable) -> int:
    if value.leaf not in (None, leaf) or (leaf is not None and not value.is_everywhere):
        return _unequal(table)
    return _number(table, "result", value.number, value.shape if leaf is None else None)


def _results(
    jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Value], table: Table
) -> list[_Value]:
    env: dict[Any, _Value] = dict(zip(jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _constant(table, var.aval, const)

    def read(var: Any) -> _Value:
        return _constant(table, var.aval, var.val) if isinstance(var, Literal) else env[var]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _made(table, eqn, list(map(read, eqn.invars))), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _made(table: Table, eqn: Any, operands: list[_Value]) -> list[_Value]:
    """Number the results of an equation."""
    name = eqn.primitive.name
    shapes = [var.aval.shape for var in eqn.outvars]
    program = called_program(eqn)
    branches = branches_of(eqn)
    order = permutation_of(eqn)
    if program is not None:
        # Followed inside, so that equations have the same numbers with and without a call.
        return _results(program.jaxpr, program.consts, operands, table)
    if branches:
        # Each result is numbered separately, independent of the branches' other results.
        choice, *inside = operands
        chosen = [_results(each.jaxpr, each.consts, inside, table) for each in branches]
        return [
            _combined(table, shape, (choice, *values), "cond", is_elementwise=True)
            for shape, *values in zip(shapes, *chosen, strict=True)
        ]
    if order is not None and operands[0].leaf is None:
        number = _transposed(table, operands[0].number, order)
        return [operands[0]._replace(shape=shapes[0], number=number)]
    if name == FILL and operands[0].is_everywhere:
        # Also of a divided array. If it is repeated, the value is larger than its leaf, and only
        # equations that are not element-wise could make it a result.
        return [operands[0]._replace(shape=shapes[0])]
    # Programs inside, such as the body of a loop, are compared as a whole.
    key = _number(table, name, params_key(name, eqn.params))
    is_elementwise = name_of(eqn) in ELEMENTWISE | CASTS
    return [
        _combined(table, shape, operands, key, place, is_elementwise=is_elementwise)
        for place, shape in enumerate(shapes)
    ]


def _combined(
    table: Table,
    shape: tuple[int, ...],
    operands: Sequence[_Value],
    *key: Hashable,
    is_elementwise: bool,
) -> _Value:
    """Number a value that is computed from operands."""
    leaves = {value.leaf for value in operands} - {None}
    if is_elementwise and len(leaves) <= 1 and all(value.is_everywhere for value in operands):
        number = _number(table, *key, *(value.number for value in operands))
        return _Value(shape, number, True, next(iter(leaves), None))
    if leaves:
        # Elements at several indices are combined, or are treated by their index.
        return _Value(shape, _unequal(table), False, next(iter(leaves)))
    return _whole(table, shape, *key, *((value.number, value.shape) for value in operands))


def _constant(table: Table, aval: Any, value: Any) -> _Value:
    if not isinstance(value, Tracer) and isinstance(aval.dtype, np.dtype):
        host = np.asarray(value, aval.dtype)
        first = host.reshape(-1)[:1]
        # As bytes, because 0.0 equals -0.0 and nan does not equal nan.
        if host.tobytes() == first.tobytes() * host.size:
            return _Value(host.shape, _number(table, "constant", value_key(first)), True)
    return _whole(table, aval.shape, "constant", aval, value_key(value))


def _transposed(table: Table, operand: int, order: tuple[int, ...]) -> int:
    """Number a transpose; if it inverts an earlier one, return the original value's number."""
    number = _number(table, "transpose", operand, order)
    table.setdefault(("transpose", number, tuple(map(order.index, range(len(order))))), operand)
    return number
