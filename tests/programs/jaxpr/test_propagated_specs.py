"""Shardings followed through a program, beside those that XLA chooses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.programs.jaxpr import propagated_specs

X, W = P(), P(None, "model")
KEY = jax.random.key(0, impl="rbg")


def attention(x: jax.Array, w: jax.Array) -> Any:
    heads = (x @ w).reshape(2, 4, 4, 2)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads) / 3.0)
    return heads, scores, jnp.einsum("bhqk,bkhd->bqhd", scores, heads).reshape(2, 4, 8)


def summed(x: jax.Array, w: jax.Array) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w.T), x[0] @ w + 1.0


def scanned(x: jax.Array, w: jax.Array) -> Any:
    def step(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.sin(x @ w) * scale
        return y @ w.T, y

    return jax.lax.scan(step, x, jnp.arange(3.0))


def row_by_row(x: jax.Array, w: jax.Array) -> Any:
    rows = jax.lax.with_sharding_constraint(x, P("model", None, None))
    return jax.lax.map(jnp.tanh, rows), jax.lax.scan(lambda c, row: (c + row, None), x[0], rows)[0]


def branched(x: jax.Array, w: jax.Array) -> Any:
    return jax.lax.cond(x.sum() > 0, lambda y: jnp.sin(y) * 2.0, jnp.cos, x @ w)


def nested(x: jax.Array, w: jax.Array) -> Any:
    last = P(None, None, "model")
    return jax.shard_map(
        lambda x, w: x @ w, in_specs=(X, W), out_specs=last, axis_names={"model"}, check_vma=False
    )(x, w)


def constrained(x: jax.Array, w: jax.Array) -> Any:
    x = jax.lax.with_sharding_constraint(x, P(None, "model", None))
    return (
        x + 1.0,
        x.sum(-1),
        jax.checkpoint(jax.jit(jnp.sin))(x),
        jax.lax.with_sharding_constraint(x @ w, P()),
    )


def drawn(x: jax.Array, w: jax.Array) -> Any:
    key = jax.random.fold_in(KEY, 1)
    return (x @ w) * 0.5, jax.random.split(key), jnp.zeros(3)


def differentiated(x: jax.Array, w: jax.Array) -> Any:
    # One of the cotangents that are added up is sharded, the other is not.
    return jax.grad(
        lambda y: (
            jnp.sum(jax.lax.with_sharding_constraint(y, P(None, None, "model")) ** 2) + jnp.sum(y)
        )
    )(x)


@pytest.mark.parametrize(
    "function",
    [attention, summed, scanned, row_by_row, branched, nested, constrained, differentiated, drawn],
)
def test_they_are_those_of_the_compiled_program(function: Callable[..., Any]) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    structs = (
        jax.ShapeDtypeStruct((2, 4, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
    )
    traced: list[Any] = []

    def run(*args: jax.Array) -> Any:
        traced.append(jax.make_jaxpr(function)(*structs))
        return function(*args)

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    shardings = [NamedSharding(mesh, spec) for spec in (X, W)]
    compiled = jax.jit(mapped, in_shardings=shardings).lower(*structs).compile()
    found = propagated_specs(traced[-1], [X, W], mesh.abstract_mesh, ["data"])
    shapes = jax.tree.leaves(jax.eval_shape(mapped, *structs))
    chosen = jax.tree.leaves(compiled.output_shardings)
    for shape, spec, sharding in zip(shapes, found, chosen, strict=True):
        assert NamedSharding(mesh, spec).shard_shape(shape.shape) == sharding.shard_shape(
            shape.shape
        )
