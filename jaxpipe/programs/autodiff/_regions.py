"""Rearranges a traced function so that JAX keeps little of it for the backward.

This happens before the function is differentiated. A region is a call of `jax.checkpoint`. JAX
differentiates a region by the region's own policy, independent of its surroundings.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax

from jaxpipe.programs.jaxpr import (
    ClosedJaxpr,
    Jaxpr,
    ScanForm,
    Values,
    all_equations,
    bind,
    branches_of,
    called_program,
    primitives,
    programs_inside,
    read,
    region_policy,
    save_reduced,
    scan_form,
    scope_of,
)

from ._policy import is_cheap, is_kept_in_branches, without_complex

_KEPT_IN_BRANCHES = without_complex(is_kept_in_branches)

_FOLLOWED = primitives.CALLS | primitives.REGIONS | {primitives.SCAN, primitives.COND}
"""Equations whose programs are searched for regions.

Custom rules are not included, because JAX differentiates them as a whole.
"""


def find_regions(closed: ClosedJaxpr) -> list[set[int]]:
    """Find a function's regions: for each kind the ids of equations with the same program."""
    kinds: dict[str, set[int]] = {}
    for eqn in _with_inside(closed.jaxpr.eqns):
        # Regions with only arithmetic are always inlined; see `arrange`.
        if _is_region(eqn) and not _is_light(eqn):
            # Compared as printed: layers of one kind are decided together, and differences between
            # constants do not matter here.
            kinds.setdefault(str(programs_inside(eqn)[0]), set()).add(id(eqn))
    return list(kinds.values())


def arrange(closed: ClosedJaxpr, regions: Set[int]) -> Callable[..., list[Any]]:
    """Make a function that computes the same as a traced one and keeps less for its backward."""
    # Regions whose ids are not in `regions` are inlined, and regions with only arithmetic always:
    # values that follow by cheap equations are recomputed in any case, if less is kept then.
    return lambda *args: _run(closed.jaxpr, closed.consts, args, regions)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], regions: Set[int]) -> list[Any]:
    env: Values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [read(env, x) for x in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, values, regions), strict=True))
    return [read(env, x) for x in jaxpr.outvars]


def _equation(eqn: Any, values: list[Any], regions: Set[int]) -> list[Any]:
    if branches_of(eqn):
        # JAX would keep all values of a branch, including its weights. A branch is therefore made
        # to recompute its cheap equations. A branch that contains a region recomputes everything,
        # except for the values that the region keeps by name.
        inside = [region_policy(x) for x in _with_inside([eqn]) if id(x) in regions]
        policy = (save_reduced if save_reduced in inside else None) if inside else _KEPT_IN_BRANCHES
        # No barrier: a branch of the backward is a separate program, and XLA merges nothing of the
        # forward with it.
        return jax.checkpoint(lambda *xs: bind(eqn, xs), policy=policy, prevent_cse=False)(*values)
    if not any(_changes(x, regions) for x in _with_inside([eqn])):
        return bind(eqn, values)
    if _is_region(eqn) and not _changes(eqn, regions):
        return bind(eqn, values)
    with jax.named_scope(scope_of(eqn)):
        program = called_program(eqn)
        scan = scan_form(eqn)
        if scan is not None:
            return _scan(scan, values, regions)
        assert program is not None, "only calls, scans and branches are looked into"
        return _run(program.jaxpr, program.consts, values, regions)


def _scan(scan: ScanForm, values: list[Any], regions: Set[int]) -> list[Any]:
    body = scan.body
    num_consts = scan.num_consts
    num_fixed = scan.num_consts + scan.num_carry

    def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body.jaxpr, body.consts, [*values[:num_consts], *carry, *xs], regions)
        return results[: len(carry)], results[len(carry) :]

    final, stacked = jax.lax.scan(
        step, values[num_consts:num_fixed], values[num_fixed:], **scan.settings
    )
    return [*final, *stacked]


def _changes(eqn: Any, regions: Set[int]) -> bool:
    return bool(branches_of(eqn)) or (_is_region(eqn) and id(eqn) not in regions)


def _is_region(eqn: Any) -> bool:
    return eqn.primitive.name in primitives.REGIONS


def _is_light(eqn: Any) -> bool:
    """True if a region only has arithmetic and reductions, and no policy set by the user."""
    return region_policy(eqn) in (None, save_reduced) and _is_arithmetic(
        programs_inside(eqn)[0].jaxpr
    )


def _is_arithmetic(jaxpr: Jaxpr) -> bool:
    def holds(eqn: Any) -> bool:
        if eqn.primitive.name in primitives.CALLS | {primitives.CUSTOM_JVP}:
            return all(_is_arithmetic(program.jaxpr) for program in programs_inside(eqn))
        return is_cheap(eqn) or eqn.primitive.name in primitives.REDUCTIONS

    return all(map(holds, jaxpr.eqns))


def _with_inside(eqns: Iterable[Any]) -> Iterator[Any]:
    """Yield equations and the equations inside them, where regions are searched for."""
    return all_equations(eqns, lambda eqn: eqn.primitive.name in _FOLLOWED)
