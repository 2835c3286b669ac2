"""Numbers of a traced program's values, equal where they are the same expressions."""

from collections.abc import Hashable, Sequence
from typing import Any

from ._equation import ClosedJaxpr, Jaxpr, Literal, branches_of, called_program, permutation_of
from ._keys import params_key, value_key


def value_numbers(
    closed: ClosedJaxpr, inputs: Sequence[Hashable], table: dict[Hashable, int] | None = None
) -> list[int]:
    """Number the results of a traced program.

    Numbers are equal where results are computed alike from inputs that count as equal.

    Calls and conditionals are followed inside; other inner programs, such as the body of a loop,
    are compared as a whole.

    Args:
        closed: The trace.
        inputs: What each input counts as.
        table: The numbers given so far, which grows: programs numbered with one table can be
            compared. None: a new one.

    Returns:
        A number per output.
    """
    table = {} if table is None else table
    given = [
        _number(table, "input", var.aval, x)
        for var, x in zip(closed.jaxpr.invars, inputs, strict=True)
    ]
    return _results(closed.jaxpr, closed.consts, given, table)


def _number(table: dict[Hashable, int], *key: Hashable) -> int:
    return table.setdefault(key, len(table))


def _results(
    jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[int], table: dict[Hashable, int]
) -> list[int]:
    env: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _number(table, "const", var.aval, value_key(const))

    def read(var: Any) -> int:
        return (
            _number(table, "literal", var.aval, value_key(var.val))
            if isinstance(var, Literal)
            else env[var]
        )

    for eqn in jaxpr.eqns:
        operands = [read(var) for var in eqn.invars]
        program = called_program(eqn)
        if program is not None:
            # Inside, so that a call and the same equations without one have the same numbers.
            env.update(
                zip(
                    eqn.outvars,
                    _results(program.jaxpr, program.consts, operands, table),
                    strict=True,
                )
            )
            continue
        branches, order = branches_of(eqn), permutation_of(eqn)
        if branches:
            # Result by result: each is the same whatever else the branches compute.
            choice, *inside = operands
            results = [_results(each.jaxpr, each.consts, inside, table) for each in branches]
            for var, *chosen in zip(eqn.outvars, *results, strict=True):
                env[var] = _number(table, "cond", choice, *chosen)
            continue
        if order is not None:
            env[eqn.outvars[0]] = _transposed(table, operands[0], order)
            continue
        # All results of an equation from one number: how it is computed is looked up once, its
        # results are told apart.
        computed = _number(
            table, eqn.primitive.name, params_key(eqn.primitive.name, eqn.params), tuple(operands)
        )
        for place, var in enumerate(eqn.outvars):
            env[var] = _number(table, "output", computed, place)
    return [read(var) for var in jaxpr.outvars]


def _transposed(table: dict[Hashable, int], operand: int, order: tuple[int, ...]) -> int:
    """The number of a transpose; where it undoes one before it, that of what was transposed."""
    number = _number(table, "transpose", operand, order)
    table.setdefault(("transpose", number, tuple(map(order.index, range(len(order))))), operand)
    return number
