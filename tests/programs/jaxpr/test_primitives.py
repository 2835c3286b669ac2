"""Every primitive that is known by name exists in the installed JAX."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jaxpipe.programs.jaxpr import called_program, output_dependence, primitives, programs_inside

X = jnp.ones((4, 4))
SETS = {
    name: names - primitives.NOT_IN_EVERY_JAX
    for name, names in vars(primitives).items()
    if isinstance(names, frozenset)
}


def traced() -> Iterator[Any]:
    """Traces of functions whose primitives no public module of JAX lists."""
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    quantised, scales = (
        jnp.ones((1, 32, 64), jnp.float8_e4m3fn),
        jnp.ones((1, 32, 2), jnp.float8_e8m0fnu),
    )
    yield jax.make_jaxpr(
        lambda: jax.random.key_data(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)))
    )()
    yield jax.make_jaxpr(lambda x: jax.lax.ragged_dot(x, x[None], jnp.array([4])))(X)
    yield jax.make_jaxpr(lambda x: jax.lax.scaled_dot(x, x))(X)
    yield jax.make_jaxpr(lambda x, s: jax.nn.scaled_matmul(x, x, s, s))(quantised, scales)
    yield jax.make_jaxpr(
        lambda x: (jax.debug.callback(print, x), jax.pure_callback(print, struct, x))[1]
    )(X)
    yield jax.make_jaxpr(lambda x: io_callback(print, struct, x))(X)
    yield jax.make_jaxpr(lambda x: jax.debug.print("{x}", x=x))(X)
    yield jax.make_jaxpr(lambda x: jax.debug.breakpoint() or x)(X)
    yield jax.make_jaxpr(lambda x: jax.debug.inspect_array_sharding(x, callback=print))(X)
    yield jax.make_jaxpr(lambda x: jax.ffi.ffi_call("any", struct)(x))(X)
    yield jax.make_jaxpr(pl.pallas_call(lambda x, y: None, out_shape=struct))(X)
    yield jax.make_jaxpr(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P()))(X)


def names_in(closed: Any) -> set[str]:
    inner = [names_in(program) for eqn in closed.jaxpr.eqns for program in programs_inside(eqn)]
    return {eqn.primitive.name for eqn in closed.jaxpr.eqns}.union(*inner)


@functools.cache
def existing() -> set[str]:
    return public().union(*map(names_in, traced()))


def public() -> set[str]:
    listed = [
        value for module in (jax.lax, jax.extend.core.primitives) for value in vars(module).values()
    ]
    return {value.name for value in listed if isinstance(value, Primitive)}


def test_every_name_is_one_of_the_installed_jax() -> None:
    for name in SETS:
        assert sorted(SETS[name] - existing()) == []


def test_no_primitive_of_the_installed_jax_is_overlooked() -> None:
    # A name that this library does not know is no error: its results are held, and its work is not
    # counted.
    assert sorted(name for name in existing() if not primitives.is_known(name)) == []


def test_calls_are_what_jax_traces_them_as() -> None:
    @jax.custom_vjp
    def with_rule(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    with_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    for function in (jax.jit(jnp.sin), jax.checkpoint(jnp.sin), with_rule, jax.nn.relu):
        (eqn,) = jax.make_jaxpr(function)(X).jaxpr.eqns
        program = called_program(eqn)
        assert program is not None
        assert len(program.jaxpr.invars) == len(eqn.invars)
        assert len(program.jaxpr.outvars) == len(eqn.outvars)


def test_programs_inside() -> None:
    def solve(x: jax.Array) -> jax.Array:
        return jax.lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2, symmetric=True)

    counts = {
        "scan": (lambda x: jax.lax.scan(lambda c, y: (c, y), x[0], x), 1),
        "while": (lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c - 1, x), 2),
        "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), 2),
        "custom_linear_solve": (solve, 4),
        "sin": (jnp.sin, 0),
    }
    for name, (function, count) in counts.items():
        found = [
            programs_inside(eqn)
            for eqn in jax.make_jaxpr(function)(X).jaxpr.eqns
            if eqn.primitive.name == name
        ]
        assert [len(programs) for programs in found] == [count], name


def test_what_a_scan_carries_is_told_from_what_it_slices() -> None:
    def function(const: jax.Array, carry: jax.Array, sliced: jax.Array) -> Any:
        return jax.lax.scan(lambda c, x: (c + x, const), carry, sliced)

    jaxpr = jax.make_jaxpr(function)(X[0], X[0], X).jaxpr
    assert output_dependence(jaxpr, [1, 2, 4]) == [2 | 4, 1]
