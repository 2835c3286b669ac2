"""The part of a program that some of its values need, and running it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ._equation import Literal, bind, has_side_effects, is_barrier, scope_of
from ._program import Program, Scan, Values, operands, read, variables

_FULL_BYTES = 4
"""Bytes of the numbers that XLA computes with; it has no excess precision for them."""


@dataclass
class Slice:
    """A part of a program.

    The variables it needs or computes, and the ids of the equations that run.
    """

    variables: set[Any] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)


def needed_for(
    program: Program,
    wanted: Iterable[Any],
    given: Collection[Any] = frozenset(),
    forced: Set[int] = frozenset(),
) -> Slice:
    """Equations that have to run so that some values are known.

    Args:
        program: The function.
        wanted: Variables of it and of its bodies; literals are let be.
        given: Variables of it and of its bodies that are known already.
        forced: Ids of equations that have to run too.
    """
    goals = variables(wanted)
    part = Slice(set(goals))
    # From the end: whether an equation runs is known once all that reads its results has been
    # asked.
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        if i in program.scans:
            _need_scan(eqn, program.scans[i], part, goals, given, forced)
            continue
        # A barrier's operands one by one: that one of them is needed does not make the others
        # needed.
        for results, used in operands(eqn):
            if id(eqn) in forced or any(_is_open(var, part, given) for var in results):
                part.steps.add(id(eqn))
                part.variables.update(used)
    return part


def reached_from(
    program: Program,
    found: Set[Any],
    starts: Callable[[Any, int], bool] = lambda eqn, times: False,
    blocked: Collection[Any] = frozenset(),
    times: int = 1,
) -> set[Any]:
    """The variables that depend on some others, or on what some equations give.

    Args:
        program: The function.
        found: Variables of it.
        starts: Tells of an equation, and how often it runs, whether its results belong to the set
            in any case.
        blocked: Variables that never belong to it.
        times: How often the program runs.
    """
    reached = set(found)
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            scan = program.scans[i]
            reached.update(
                v for x, v in (*scan.fixed, *scan.sliced) if _is_in(x, reached) and v not in blocked
            )
            reached.update(
                c.inner
                for c in scan.carried
                if _is_in(c.initial, reached) and c.inner not in blocked
            )
            size = -1
            # What reaches the end of one step is there from the next one's beginning on: until
            # nothing is new.
            while size != len(reached):
                size = len(reached)
                reached = reached_from(
                    scan.body, reached, starts, blocked, times * scan.form.length
                )
                reached.update(
                    c.inner
                    for c in scan.carried
                    if _is_in(c.output, reached) and c.inner not in blocked
                )
            pairs = [*scan.stacked, *((c.output, c.result) for c in scan.carried)]
            reached.update(v for x, v in pairs if _is_in(x, reached) and v not in blocked)
            continue
        for results, used in operands(eqn):
            if starts(eqn, times) or any(x in reached for x in used):
                reached.update(v for v in results if v not in blocked)
    return reached


def computed_by(program: Program, part: Slice) -> set[Any]:
    """The variables that running a part gives, wanted or not."""
    found = set()
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            scan = program.scans[i]
            names = [
                *(v for c in scan.carried for v in (c.inner, c.result)),
                *(v for _, v in scan.stacked),
            ]
            found |= {v for v in names if v in part.variables} | computed_by(scan.body, part)
        elif id(eqn) in part.steps:
            found |= {v for v in eqn.outvars if not is_barrier(eqn) or v in part.variables}
    return found


def effects_of(program: Program) -> set[int]:
    """Ids of equations that do something beside giving results, such as a callback that prints."""
    found = set()
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            inner = effects_of(program.scans[i].body)
            # With an equation of the body the scan has to run itself.
            found |= {*inner, id(eqn)} if inner else set()
        elif has_side_effects(eqn):
            found.add(id(eqn))
    return found


def evaluate(  # noqa: PLR0913  # a function, what of it, what is known, what is asked
    program: Program,
    args: Values,
    part: Slice,
    given: Values,
    taken: Sequence[Any],
    turns: Mapping[int, Callable[[Values], Values]] | None = None,
) -> tuple[Values, Values]:
    """Run a part of a program.

    Args:
        program: The function.
        args: Its inputs, those that the part needs.
        part: What to run.
        given: What is known already, with values of bodies stacked.
        taken: Variables to hand out. What is computed from them here sees them as they are handed
            out: XLA may carry a number of 16 bits with more precision than that up to where it is
            stored.
        turns: By the index of an equation what is done when it has run; see `turns_of`.

    Returns:
        `(values of the program's own variables, values taken)`, those of bodies stacked.
    """
    narrow = {var for var in taken if _is_narrow(var)}
    env = {**program.consts, **given, **args}
    inner: Values = {}
    for i, eqn in enumerate(program.eqns):
        if id(eqn) not in part.steps:
            continue
        if i in program.scans:
            with jax.named_scope(scope_of(eqn)):
                results, handed = _run_scan(program.scans[i], env, part, given, taken)
            inner |= handed
        elif is_barrier(eqn):
            pairs = [
                (v, x)
                for v, x in zip(eqn.outvars, eqn.invars, strict=True)
                if _is_open(v, part, given)
            ]
            values = jax.lax.optimization_barrier([read(env, x) for _, x in pairs])
            results = dict(zip([v for v, _ in pairs], values, strict=True))
        else:
            results = dict(
                zip(eqn.outvars, bind(eqn, [read(env, x) for x in eqn.invars]), strict=True)
            )
        # An equation of several results may run for one of them: what is given of the others stays
        # as it is given.
        env.update(
            (v, _rounded(x) if v in narrow else x) for v, x in results.items() if v not in given
        )
        if turns and i in turns:
            env.update(turns[i](env))
    return env, {
        var: env[var] if var in env else inner[var] for var in taken if var in env or var in inner
    }


def _run_scan(
    scan: Scan, env: Values, part: Slice, given: Values, taken: Sequence[Any]
) -> tuple[Values, Values]:
    carried = [
        c for c in scan.carried if _is_open(c.result, part, given) or _is_open(c.inner, part, given)
    ]
    sliced = [(x, v) for x, v in scan.sliced if v in part.variables]
    stacked = [(x, v) for x, v in scan.stacked if _is_open(v, part, given)]
    fixed = {v: read(env, x) for x, v in scan.fixed if v in part.variables}
    # Values of the body are stacked outside of it, one a step: given ones are sliced, those handed
    # out are stacked.
    known = {v: x for v, x in given.items() if v in scan.body.variables}
    handed = [v for v in taken if v in scan.body.variables]

    def step(
        carry: list[Any], xs: tuple[list[Any], list[Any]]
    ) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        args = {**fixed, **dict(zip([c.inner for c in carried], carry, strict=True))}
        args |= zip([v for _, v in sliced], xs[0], strict=True)
        values, out = evaluate(scan.body, args, part, dict(zip(known, xs[1], strict=True)), handed)
        ys = [read(values, x) for x, _ in stacked]
        return [read(values, c.output) for c in carried], (ys, [out[v] for v in handed])

    final, (ys, out) = jax.lax.scan(
        step,
        [read(env, c.initial) for c in carried],
        ([read(env, x) for x, _ in sliced], list(known.values())),
        **scan.form.settings,
    )
    results = dict(zip([c.result for c in carried], final, strict=True))
    results |= zip([v for _, v in stacked], ys, strict=True)
    return results, dict(zip(handed, out, strict=True))


def _need_scan(
    eqn: Any,
    scan: Scan,
    part: Slice,
    goals: Sequence[Any],
    given: Collection[Any],
    forced: Set[int],
) -> None:
    carried = [c for c in scan.carried if _is_open(c.result, part, given)]
    wanted = [x for x, v in scan.stacked if _is_open(v, part, given)]
    wanted += [v for v in goals if v in scan.body.variables]
    if not carried and not wanted and id(eqn) not in forced:
        return
    # What the wanted carries are computed from may be carries too, which then have to run from the
    # first step on.
    while True:
        inner = needed_for(scan.body, [*wanted, *(c.output for c in carried)], given, forced)
        more = [c for c in scan.carried if c in carried or _is_open(c.inner, inner, given)]
        if len(more) == len(carried):
            break
        carried = more
    part.steps |= inner.steps | {id(eqn)}
    part.variables |= inner.variables
    part.variables.update(
        variables(x for x, v in (*scan.fixed, *scan.sliced) if v in inner.variables)
    )
    part.variables.update(variables(c.initial for c in carried))


def _is_in(x: Any, found: Collection[Any]) -> bool:
    return not isinstance(x, Literal) and x in found


def _is_open(var: Any, part: Slice, given: Collection[Any]) -> bool:
    """True if a variable is needed and not known."""
    return var in part.variables and var not in given


def _is_narrow(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.dtype.itemsize < _FULL_BYTES


def _rounded(x: jax.Array) -> jax.Array:
    # Casts to 32 bits and back would not do: XLA takes such a pair for needless and drops it.
    bits = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
