"""Dependence of a traced function's outputs on its inputs."""

from collections.abc import Sequence
from typing import Any

from ._equation import Jaxpr, Literal, ScanForm, called_program, scan_form


def output_dependence(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Follow sets of inputs through a jaxpr.

    Calls and scans are followed inside; an output of any other equation depends on all inputs of that equation.

    Args:
        jaxpr: The traced function.
        inputs: A set per input, as the bits of an integer.

    Returns:
        The set per output: the union over all inputs it is computed from.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        sets = [read(atom) for atom in eqn.invars]
        for var, bits in zip(eqn.outvars, _equation(eqn, sets), strict=True):
            env[var] = bits
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, sets: list[int]) -> list[int]:
    union = 0
    for bits in sets:
        union |= bits
    scan = scan_form(eqn)
    if scan is not None:
        return _scan(scan, sets)
    program = called_program(eqn)
    return [union] * len(eqn.outvars) if program is None else output_dependence(program.jaxpr, sets)


def _scan(scan: ScanForm, sets: list[int]) -> list[int]:
    num_consts, num_carry = scan.num_consts, scan.num_carry
    consts, carry, sliced = sets[:num_consts], sets[num_consts:][:num_carry], sets[num_consts + num_carry :]
    while True:
        outputs = output_dependence(scan.body.jaxpr, [*consts, *carry, *sliced])
        # What a step reads of the carry may come from any step before it, so sets grow until they stay.
        grown = [a | b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        if grown == carry:
            return outputs
        carry = grown
