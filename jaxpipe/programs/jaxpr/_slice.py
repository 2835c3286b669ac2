"""Finds the part of a program that some values need, and runs it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ._equation import Literal, bind, has_side_effects, is_barrier, scope_of
from ._program import Program, Scan, Values, operands, read, variables

_FULL_BYTES = 4
"""Bytes of the narrowest floats for which XLA uses no excess precision."""


@dataclass
class Slice:
    """A part of a program: variables needed or computed, and ids of the equations that run."""

    variables: set[Any] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)


def needed_for(
    program: Program,
    wanted: Iterable[Any],
    given: Collection[Any] = frozenset(),
    forced: Set[int] = frozenset(),
) -> Slice:
    """Find the equations that must run to compute some values, also in the bodies of scans.

    `given` variables are already known; `forced` are ids of further equations that must run.
    """
    goals = variables(wanted)
    part = Slice(set(goals))
    # From the end: whether an equation runs is known after all equations that read its results.
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        if i in program.scans:
            _need_scan(eqn, program.scans[i], part, goals, given, forced)
            continue
        # The operands of a barrier are treated separately: if one is needed, the others need not
        # be.
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
    """Find the variables that depend on some variables, or on the results of some equations.

    `starts(equation, number of its runs)` says whether its results are included in any case;
    `blocked` variables never are.
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
            # Variables at the end of a step are inputs of the next one, so repeat until nothing new
            # is found.
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
    """Return the variables that a part computes, needed or not."""
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
    """Return the ids of equations with side effects, such as a callback that prints."""
    found = set()
    for i, eqn in enumerate(program.eqns):
        if i in program.scans:
            inner = effects_of(program.scans[i].body)
            # If an equation of the body must run, the scan must run too.
            found |= {*inner, id(eqn)} if inner else set()
        elif has_side_effects(eqn):
            found.add(id(eqn))
    return found


def evaluate(  # noqa: PLR0913  # program, part, known and requested values
    program: Program,
    args: Values,
    part: Slice,
    given: Values,
    taken: Sequence[Any],
    turns: Mapping[int, Callable[[Values], Values]] | None = None,
) -> tuple[Values, Values]:
    """Run a part of a program; returns `(values of its own variables, values taken)`.

    `args` are the inputs that the part needs, `given` values that are known. Values of bodies are
    stacked. `turns` are those of `turns_of`.
    """
    # Later equations use what is taken as it is returned, rounded to its dtype: XLA may otherwise
    # keep a 16-bit number in higher precision until it is stored.
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
        # An equation with several results may run for only one of them. Given values of the others
        # are not replaced.
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
    # Outside the body, its values are stacked over the steps: given values are sliced, and returned
    # values are stacked.
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
    # The wanted carries may depend on other carries, which then must run from the first step on.
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
    """True if a variable is needed and not yet known."""
    return var in part.variables and var not in given


def _is_narrow(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.dtype.itemsize < _FULL_BYTES


def _rounded(x: jax.Array) -> jax.Array:
    # A cast to 32 bits and back would not work, because XLA removes such a pair as redundant.
    bits = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, bits.nexp, bits.nmant)
