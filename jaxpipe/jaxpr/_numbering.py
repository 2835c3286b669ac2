"""Numbers the values of a traced program; the same expressions have equal numbers."""

from collections.abc import Hashable, Sequence
from typing import Any

from ._equation import ClosedJaxpr, Jaxpr, Literal, branches_of, called_program, permutation_of
from ._keys import params_key, value_key


def value_numbers(
    closed: ClosedJaxpr, inputs: Sequence[Hashable], table: dict[Hashable, int] | None = None
) -> list[int]:
    """Number the results of a traced program.

    Results have equal numbers if they are the same expressions of equal inputs. Calls and
    conditionals are followed inside. Other inner programs, such as the body of a loop, are compared
    as a whole.

    Args:
        closed: The trace.
        inputs: The identity of each input; inputs with equal identities count as equal.
        table: The numbers assigned so far, which this function extends. Programs that are numbered
            with the same table can be compared. None for a new table.

    Returns:
        One number per output.
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
            # Followed inside, so that equations have the same numbers with and without a call.
            env.update(
                zip(
                    eqn.outvars,
                    _results(program.jaxpr, program.consts, operands, table),
                    strict=True,
                )
            )
            continue
        branches = branches_of(eqn)
        order = permutation_of(eqn)
        if branches:
            # Each result is numbered separately, independent of the branches' other results.
            choice, *inside = operands
            results = [_results(each.jaxpr, each.consts, inside, table) for each in branches]
            for var, *chosen in zip(eqn.outvars, *results, strict=True):
                env[var] = _number(table, "cond", choice, *chosen)
            continue
        if order is not None:
            env[eqn.outvars[0]] = _transposed(table, operands[0], order)
            continue
        # The equation is numbered once, and its results by this number and their position.
        computed = _number(
            table, eqn.primitive.name, params_key(eqn.primitive.name, eqn.params), tuple(operands)
        )
        for place, var in enumerate(eqn.outvars):
            env[var] = _number(table, "output", computed, place)
    return [read(var) for var in jaxpr.outvars]


def _transposed(table: dict[Hashable, int], operand: int, order: tuple[int, ...]) -> int:
    """Number a transpose; if it inverts an earlier one, return the original value's number."""
    number = _number(table, "transpose", operand, order)
    table.setdefault(("transpose", number, tuple(map(order.index, range(len(order))))), operand)
    return number
