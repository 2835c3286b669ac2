"""Dependence of a traced function's outputs on its inputs."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    ScanForm,
    branches_of,
    called_program,
    programs_inside,
    scan_form,
)
from ._primitives import SHARD_MAP

T = TypeVar("T")
Rule = Callable[[Any, list[T]], list[T]]
"""From an equation and a value for each operand to a value for each result."""


def output_dependence(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """For each output, the union of the sets of inputs it is computed from, as bits of integers."""

    # An output of an equation that is not followed inside depends on all of its inputs.
    def rule(eqn: Any, sets: list[int]) -> list[int]:
        return [functools.reduce(operator.or_, sets, 0)] * len(eqn.outvars)

    return follow(jaxpr, inputs, rule, 0)


def follow(jaxpr: Jaxpr, inputs: Sequence[T], rule: Rule[T], nothing: T) -> list[T]:
    """Follow facts about values through a jaxpr, also inside calls, scans and conditionals.

    The operator `|` joins two facts. `rule` applies to all other equations; `nothing` is the fact
    about a constant.
    """
    env: dict[Any, T] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> T:
        return nothing if isinstance(atom, Literal) else env.get(atom, nothing)

    def inside(program: ClosedJaxpr, values: Sequence[T]) -> list[T]:
        return follow(program.jaxpr, values, rule, nothing)

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        scan = scan_form(eqn)
        branches = branches_of(eqn)
        is_mapped = eqn.primitive.name == SHARD_MAP
        program = programs_inside(eqn)[0] if is_mapped else called_program(eqn)
        if scan is not None:
            found = _scan(scan, values, inside)
        elif branches:
            found = _cond(branches, values, inside)
        else:
            found = rule(eqn, values) if program is None else inside(program, values)
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_Inside = Callable[[ClosedJaxpr, Sequence[Any]], list[Any]]


def _scan(scan: ScanForm, values: list[Any], inside: _Inside) -> list[Any]:
    num_consts = scan.num_consts
    num_carry = scan.num_carry
    consts = values[:num_consts]
    carry = values[num_consts:][:num_carry]
    sliced = values[num_consts + num_carry :]
    while True:
        outputs = inside(scan.body, [*consts, *carry, *sliced])
        # A step's carry may depend on any earlier step, so the facts grow until they do not change.
        grown = [a | b for a, b in zip(carry, outputs[:num_carry], strict=True)]
        if grown == carry:
            return outputs
        carry = grown


def _cond(branches: Sequence[ClosedJaxpr], values: list[Any], inside: _Inside) -> list[Any]:
    choice, *operands = values
    outputs = [inside(branch, operands) for branch in branches]
    # A result comes from one of the branches, and also depends on the choice of the branch.
    return [functools.reduce(operator.or_, found, choice) for found in zip(*outputs, strict=True)]
