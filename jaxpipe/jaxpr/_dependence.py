"""Dependence of a traced function's outputs on its inputs."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from ._equation import ClosedJaxpr, Jaxpr, Literal, ScanForm, branches_of, called_program, scan_form


def output_dependence(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Follow sets of inputs through a jaxpr.

    Calls, scans and conditionals are followed inside. An output of any other equation depends on
    all inputs of that equation.

    Args:
        jaxpr: The traced function.
        inputs: One set per input, as the bits of an integer.

    Returns:
        One set per output: the union of the sets of all inputs that it is computed from.
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
    scan = scan_form(eqn)
    branches = branches_of(eqn)
    if scan is not None:
        return _scan(scan, sets)
    if branches:
        return _cond(branches, sets)
    program = called_program(eqn)
    if program is not None:
        return output_dependence(program.jaxpr, sets)
    return [functools.reduce(operator.or_, sets, 0)] * len(eqn.outvars)


def _scan(scan: ScanForm, sets: list[int]) -> list[int]:
    num_consts = scan.num_consts
    num_carry = scan.num_carry
    consts = sets[:num_consts]
    carry = sets[num_consts:][:num_carry]
    sliced = sets[num_consts + num_carry :]
    while True:
        outputs = output_dependence(scan.body.jaxpr, [*consts, *carry, *sliced])
        # A step's carry may depend on any earlier step, so the sets grow until they do not change.
        grown = [a | b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        if grown == carry:
            return outputs
        carry = grown


def _cond(branches: Sequence[ClosedJaxpr], sets: list[int]) -> list[int]:
    choice, *operands = sets
    outputs = [output_dependence(branch.jaxpr, operands) for branch in branches]
    # A result comes from one of the branches, and also depends on the choice of the branch.
    return [functools.reduce(operator.or_, found, choice) for found in zip(*outputs, strict=True)]
