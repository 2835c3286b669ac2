"""A traced function without calls, of which parts can be run.

`jit`, custom rules and recompute are replaced by the programs that they call. The bodies of scans
are stored in addition to the equations, so that parts of a scan can be run too. Every other
equation with an inner program is treated as a whole.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    ScanForm,
    bind,
    called_program,
    is_barrier,
    kept_bits,
    on_no_mesh,
    recomputes_behind_barrier,
    replaced,
    scan_form,
    scope_of,
    target_memories,
    unknown_primitives,
)
from ._primitives import MOVE, ROUNDING
from ._versions import warn_of_unknown

Values = dict[Any, Any]
"""Arrays by variable."""


class Carry(NamedTuple):
    """Carry of a scan: its initial value, the body's input and output, and its final value."""

    initial: Any
    inner: Any
    output: Any
    result: Any


class Scan(NamedTuple):
    """A scan's body, and how the equation's operands and results correspond to the body's.

    Attributes:
        fixed: Pairs `(operand, body's input)` of values that are the same in every step.
        carried: The carries from step to step.
        sliced: Pairs `(operand, body's input)` of sliced values.
        stacked: Pairs `(body's output, result)` of stacked values.
    """

    body: "Program"
    form: ScanForm
    fixed: list[tuple[Any, Any]]
    carried: list[Carry]
    sliced: list[tuple[Any, Any]]
    stacked: list[tuple[Any, Any]]


@dataclass(frozen=True)
class Program:
    """A traced function without calls.

    No variable occurs in two programs, so a set of variables can hold values of all bodies.

    Attributes:
        outputs: Variables or literals.
        consts: The arrays that the function closes over.
        scans: The scans among the equations, by index.
        variables: The inputs and all results of equations, including those in the bodies of scans.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    eqns: Sequence[Any]
    consts: Values
    scans: Mapping[int, Scan]
    variables: Set[Any]


def flatten(closed: ClosedJaxpr, *, moves: bool = False) -> Program:
    """Inline the calls of a traced function. Without `moves`, all values are on the device."""
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    # Traced again instead of edited: a program that is called twice gets different variables at
    # each call.
    flat = jax.make_jaxpr(lambda *args: _inline(closed.jaxpr, closed.consts, args, moves))(*shapes)
    warn_of_unknown(unknown_primitives(flat.jaxpr))
    eqns = flat.jaxpr.eqns
    scans = {
        i: _scan(eqn, form, moves)
        for i, eqn in enumerate(eqns)
        if (form := scan_form(eqn)) is not None
    }
    found = {var for eqn in eqns for var in eqn.outvars}.union(
        flat.jaxpr.invars, *(x.body.variables for x in scans.values())
    )
    consts = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return Program(flat.jaxpr.invars, flat.jaxpr.outvars, eqns, consts, scans, found)


def without_mesh(program: Program) -> Program:
    """Convert a program to one for a single device, without sharding constraints and meshes."""
    # A program that runs on another mesh than it was traced on must not refer to the latter.
    nowhere = on_no_mesh()

    def plain(value: Any) -> Any:
        # A scalar that was made on a mesh refers to it too.
        return np.asarray(value) if jnp.shape(value) == () and not _is_key(value) else value

    def alone(eqn: Any) -> Any:
        atoms = [Literal(plain(x.val), x.aval) if isinstance(x, Literal) else x for x in eqn.invars]
        return replaced(eqn, context=nowhere, operands=atoms)

    consts = {var: plain(value) for var, value in program.consts.items()}
    scans = {i: scan._replace(body=without_mesh(scan.body)) for i, scan in program.scans.items()}
    return replace(program, eqns=[alone(eqn) for eqn in program.eqns], consts=consts, scans=scans)


def operands(eqn: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return pairs `(results, operands that they depend on)` of an equation, without literals."""
    if is_barrier(eqn):
        return [([out], variables([x])) for out, x in zip(eqn.outvars, eqn.invars, strict=True)]
    return [(eqn.outvars, variables(eqn.invars))]


def read(values: Values, x: Any) -> Any:
    """Return the value of a variable or literal."""
    return x.val if isinstance(x, Literal) else values[x]


def value_of(values: Values, x: Any) -> jax.Array:
    """Return the value of a variable or literal as an array."""
    return jnp.asarray(read(values, x))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the variables among atoms, without the literals."""
    return [x for x in atoms if not isinstance(x, Literal)]


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", float), jax.dtypes.prng_key)


def _scan(eqn: Any, form: ScanForm, moves: bool) -> Scan:
    body = flatten(form.body, moves=moves)
    num_consts = form.num_consts
    num_carry = form.num_carry
    into = list(zip(eqn.invars, body.inputs, strict=True))
    out = list(zip(body.outputs, eqn.outvars, strict=True))
    carry = zip(into[num_consts : num_consts + num_carry], out[:num_carry], strict=True)
    carried = [
        Carry(initial, inner, output, result) for (initial, inner), (output, result) in carry
    ]
    return Scan(
        body, form, into[:num_consts], carried, into[num_consts + num_carry :], out[num_carry:]
    )


def _inline(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], moves: bool) -> list[Any]:
    env: Values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        values = [read(env, x) for x in eqn.invars]
        program = called_program(eqn)
        # Neither changes a value, and these equations, which JAX adds around recompute, would
        # restrict cuts.
        if _keeps_all_bits(eqn) or (_moves_memory(eqn) and not moves):
            results = values
        elif program is None:
            results = bind(eqn, values)
        else:
            with jax.named_scope(scope_of(eqn)):
                results = _inline(
                    program.jaxpr, program.consts, _behind_barrier(eqn, values), moves
                )
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(env, x) for x in jaxpr.outvars]


def _moves_memory(eqn: Any) -> bool:
    places = target_memories(eqn) if eqn.primitive.name == MOVE else []
    return bool(places) and all(isinstance(place, jax.memory.Space) for place in places)


def _keeps_all_bits(eqn: Any) -> bool:
    """True if an equation rounds to the precision that its operand already has."""
    # `jax.checkpoint` adds such equations. Numbers of 16 bits are excluded: XLA may compute them
    # with higher precision, so rounding changes them.
    if eqn.primitive.name != ROUNDING or eqn.outvars[0].aval.dtype.itemsize < 4:
        return False
    bits = jnp.finfo(eqn.outvars[0].aval.dtype)
    return kept_bits(eqn) == (bits.nexp, bits.nmant)


def _behind_barrier(eqn: Any, values: list[Any]) -> list[Any]:
    """Put the operands of recompute behind a barrier."""
    marks = recomputes_behind_barrier(eqn)
    if not marks:
        return values
    # Otherwise XLA merges the recompute with the first computation and keeps all values in memory.
    barred = iter(
        jax.lax.optimization_barrier([x for x, m in zip(values, marks, strict=True) if m])
    )
    return [next(barred) if m else x for x, m in zip(values, marks, strict=True)]
