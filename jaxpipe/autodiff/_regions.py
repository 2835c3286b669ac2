"""A traced function arranged so that JAX keeps little of it for the backward.

That is done before it is differentiated.

A region is a call of `jax.checkpoint`. JAX differentiates it by its own policy, whatever surrounds
it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax

from jaxpipe.jaxpr import (
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
"""Equations in whose programs regions are looked for.

A custom rule is none: JAX differentiates it as a whole.
"""


def find_regions(closed: ClosedJaxpr) -> list[set[int]]:
    """The regions of a function by kind: ids of equations that do the same.

    Those of arithmetic alone are left out.
    """
    kinds: dict[str, set[int]] = {}
    for eqn in _with_inside(closed.jaxpr.eqns):
        if _is_region(eqn) and not _is_light(eqn):
            # As printed: layers of one kind decide together, and what tells constants apart does
            # not matter here.
            kinds.setdefault(str(programs_inside(eqn)[0]), set()).add(id(eqn))
    return list(kinds.values())


def arrange(closed: ClosedJaxpr, regions: Set[int]) -> Callable[..., list[Any]]:
    """A function that gives the same as a traced one and keeps less.

    Regions whose ids are not in `regions` are dissolved, as those of arithmetic alone always are:
    what follows by cheap equations is computed again in any case, where that leaves less to keep.
    Of a branch JAX would keep everything, its weights too; it is made to recompute what is cheap,
    and all of it where it holds a region, but for what that keeps by name.
    """
    return lambda *args: _run(closed.jaxpr, closed.consts, args, regions)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], regions: Set[int]) -> list[Any]:
    env: Values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [read(env, x) for x in eqn.invars]
        env.update(zip(eqn.outvars, _equation(eqn, values, regions), strict=True))
    return [read(env, x) for x in jaxpr.outvars]


def _equation(eqn: Any, values: list[Any], regions: Set[int]) -> list[Any]:
    if branches_of(eqn):
        inside = [region_policy(x) for x in _with_inside([eqn]) if id(x) in regions]
        policy = (save_reduced if save_reduced in inside else None) if inside else _KEPT_IN_BRANCHES
        # No barrier: a branch of the backward is a program of its own, with which XLA merges
        # nothing of the forward.
        return jax.checkpoint(lambda *xs: bind(eqn, xs), policy=policy, prevent_cse=False)(*values)
    if not any(_changes(x, regions) for x in _with_inside([eqn])):
        return bind(eqn, values)
    if _is_region(eqn) and not _changes(eqn, regions):
        return bind(eqn, values)
    with jax.named_scope(scope_of(eqn)):
        program, scan = called_program(eqn), scan_form(eqn)
        if scan is not None:
            return _scan(scan, values, regions)
        assert program is not None, "only calls, scans and branches are looked into"
        return _run(program.jaxpr, program.consts, values, regions)


def _scan(scan: ScanForm, values: list[Any], regions: Set[int]) -> list[Any]:
    body, num_consts, num_fixed = scan.body, scan.num_consts, scan.num_consts + scan.num_carry

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
    """True if a region does arithmetic and sums alone, and has no policy of a user's own."""
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
    """Equations and those inside of them in which regions are looked for."""
    return all_equations(eqns, lambda eqn: eqn.primitive.name in _FOLLOWED)
