"""Finds the shardings over automatic axes that a traced program constrains or propagates."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxpipe._util.mesh import NO_MESH

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    all_equations,
    bind_here,
    branches_of,
    called_program,
    constraint_spec,
    is_barrier,
    mapped_out_specs,
    refuses_sharding,
    scan_form,
    scope_of,
)
from ._primitives import CASTS, NAMED, ROUNDING, SHARD_MAP, SUM_OF_COTANGENTS

_PASSING = CASTS | {NAMED, ROUNDING}
"""Equations with one operand, which has the result's shape and sharding."""


def output_specs(closed: ClosedJaxpr) -> list[P]:
    """For each result, the spec of the constraint it comes from, also through casts and calls."""
    return [_spec_of(closed.jaxpr, variable) for variable in closed.jaxpr.outvars]


def constrained_axes(closed: ClosedJaxpr) -> set[str]:
    """Return the mesh axes in sharding constraints, also inside calls, loops and branches."""
    specs = map(constraint_spec, all_equations(closed.jaxpr.eqns))
    return {axis for spec in specs for names in spec or () for axis in spec_axes(names)}


def _spec_of(jaxpr: Jaxpr, variable: Any) -> P:
    eqn = next((eqn for eqn in jaxpr.eqns if any(variable is made for made in eqn.outvars)), None)
    if eqn is None:
        return P()
    position = next(i for i, made in enumerate(eqn.outvars) if made is variable)
    spec = constraint_spec(eqn)
    if spec is not None:
        return spec
    if is_barrier(eqn) or eqn.primitive.name in _PASSING:
        return _spec_of(jaxpr, eqn.invars[position])
    inside = called_program(eqn)
    return P() if inside is None else _spec_of(inside.jaxpr, inside.jaxpr.outvars[position])


def propagated_specs(
    closed: ClosedJaxpr,
    specs: Sequence[P],
    mesh: AbstractMesh,
    manual: Sequence[str],
    kernel_scope: str | None = None,
) -> list[P]:
    """Follow shardings from operands to results of a program, by JAX's rules for explicit axes.

    XLA's partitioner only decides during compilation, and also propagates from results to operands,
    so it may divide more. If the rules leave a sharding open, as for a product over a sharded dim,
    the result counts as not sharded over that axis.

    The program was traced with all axes automatic except the `manual` ones. `specs` are the
    shardings of its operands over the automatic axes.
    """
    seen = followed_specs(closed, specs, mesh, manual, kernel_scope)
    return [P() if isinstance(x, Literal) else seen[x] for x in closed.jaxpr.outvars]


def followed_specs(
    closed: ClosedJaxpr,
    specs: Sequence[P],
    mesh: AbstractMesh,
    manual: Sequence[str],
    kernel_scope: str | None = None,
) -> dict[Any, P]:
    """Follow shardings like `propagated_specs`; return those of all variables, also in bodies.

    Equations in the scope `kernel_scope` count as one kernel: results are sharded like operands of
    the same shape.
    """
    types = tuple(
        AxisType.Auto if name in manual else AxisType.Explicit for name in mesh.axis_names
    )
    explicit = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    found: dict[Any, P] = {}

    def run(*values: jax.Array) -> tuple[()]:
        placed = [_placed(value, spec) for value, spec in zip(values, specs, strict=True)]
        _follow(closed.jaxpr, placed, found, kernel_scope)
        return ()

    mapped = jax.shard_map(
        run, mesh=explicit, in_specs=P(), out_specs=P(), axis_names=set(manual), check_vma=False
    )
    with jax.sharding.use_abstract_mesh(NO_MESH):  # the user may have set a mesh
        jax.eval_shape(
            mapped, *(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in closed.jaxpr.invars)
        )
    return found


def _follow(
    jaxpr: Jaxpr, values: Sequence[jax.Array], seen: dict[Any, P], kernel_scope: str | None = None
) -> list[jax.Array]:
    # Literals and constants belong to the mesh of automatic axes, and their values do not matter.
    env: dict[Any, jax.Array] = {var: _blank(var) for var in jaxpr.constvars}
    env |= zip(jaxpr.invars, values, strict=True)

    def value(x: Any) -> jax.Array:
        return _blank(x) if isinstance(x, Literal) else env[x]

    eqns: Sequence[Any] = jaxpr.eqns
    for eqn in eqns:
        if kernel_scope is not None and kernel_scope in scope_of(eqn):
            given = [env[x] for x in eqn.invars if not isinstance(x, Literal)]
            known = {x.shape: x for x in given if any(_spec(x))}
            if known and (
                scan_form(eqn) is not None or any(_blank(out).shape in known for out in eqn.outvars)
            ):
                for out in eqn.outvars:
                    blank = _blank(out)
                    env[out] = (
                        _placed(blank, _spec(known[blank.shape])) if blank.shape in known else blank
                    )
                continue
        env.update(zip(eqn.outvars, _results(eqn, list(map(value, eqn.invars)), seen), strict=True))
    seen.update((var, _spec(known)) for var, known in env.items())
    return list(map(value, jaxpr.outvars))


def _results(eqn: Any, values: list[jax.Array], seen: dict[Any, P]) -> list[jax.Array]:
    inside = called_program(eqn)
    asked = constraint_spec(eqn)
    branches = branches_of(eqn)
    scan = scan_form(eqn)
    if inside is not None:
        return _follow(inside.jaxpr, values, seen)
    if asked is not None:
        return [_placed(values[0], asked)]
    if branches:
        # The first branch stands for all, because it is not known which one runs.
        return _follow(branches[0].jaxpr, values[1:], seen)
    if eqn.primitive.name == SHARD_MAP:
        return [
            _placed(_blank(x), spec)
            for x, spec in zip(eqn.outvars, mapped_out_specs(eqn), strict=True)
        ]
    if scan is not None:
        num_fixed = scan.num_consts + scan.num_carry
        # Not taken with an equation: JAX's rules have no slice of a dim that is sharded.
        sliced = [
            _placed(_blank(x), P(*_spec(whole)[1:]))
            for x, whole in zip(scan.body.jaxpr.invars[num_fixed:], values[num_fixed:], strict=True)
        ]
        # The body is followed once, and its final carry stands for the last step's carry.
        found = _follow(scan.body.jaxpr, [*values[:num_fixed], *sliced], seen)
        final = found[: scan.num_carry]
        steps = found[scan.num_carry :]
        stacked = eqn.outvars[scan.num_carry :]
        return [
            *final,
            *(_placed(_blank(x), P(None, *_spec(y))) for x, y in zip(stacked, steps, strict=True)),
        ]
    axes = dict.fromkeys(
        axis for value in values for names in _spec(value) for axis in spec_axes(names)
    )
    # JAX's rules reject equations that the partitioner would handle, such as operands with
    # different shardings or a contracted dim that is sharded. In that case one axis is dropped, and
    # if that is not enough, all axes. The result is then incomplete, but not wrong.
    for without in ((), *((axis,) for axis in axes), tuple(axes)):
        given = [_placed(value, _spec(value), without) if axes else value for value in values]
        try:
            # A sum of cotangents has no sharding rule, because JAX assumes that both operands are
            # sharded alike.
            return (
                [jax.lax.add(*given)]
                if eqn.primitive.name == SUM_OF_COTANGENTS
                else bind_here(eqn, given)
            )
        except Exception as error:
            if not refuses_sharding(error):
                raise
    return list(map(_blank, eqn.outvars))


def _blank(x: Any) -> jax.Array:
    """Make an array of a variable's shape and dtype that is not sharded."""
    if jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key):
        # A key may have any generator.
        return jnp.broadcast_to(jax.random.key(0), x.aval.shape)
    return jnp.zeros(x.aval.shape, x.aval.dtype)


def _placed(value: jax.Array, spec: P, without: Sequence[str] = ()) -> jax.Array:
    wanted = P(*spec_without(spec, *without), *[None] * (value.ndim - len(spec)))
    return value if _spec(value) == wanted else jax.sharding.reshard(value, wanted)


def _spec(value: jax.Array) -> P:
    return jax.typeof(value).sharding.spec


def spec_without(spec: P, *axes: str | None) -> P:
    """Remove axes from a spec, which keeps an entry for each dim even if no axis is left."""

    def one(entry: Any) -> Any:
        left = tuple(axis for axis in spec_axes(entry) if axis not in axes)
        return left if len(left) > 1 else left[0] if left else None

    return P(*map(one, spec))


def spec_axes(names: Any) -> tuple[str, ...]:
    """Return the axes of a dim's entry in a spec."""
    return names if isinstance(names, tuple) else (names,) if isinstance(names, str) else ()
