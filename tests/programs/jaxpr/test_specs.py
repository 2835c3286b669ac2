"""Shardings that programs constrain, and what recompute keeps by them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.programs.jaxpr import (
    REDUCED,
    constrained_axes,
    output_specs,
    save_reduced,
    save_whole,
    spec_axes,
    spec_without,
)

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("a", "b", "c"))
X = jnp.ones((4, 4))


def kept(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def test_results_have_the_spec_of_the_constraint_that_they_come_from() -> None:
    def both(x: jax.Array) -> Any:
        return kept(x, "a"), kept(x, None, "b")

    def barred(x: jax.Array) -> Any:
        return jax.lax.optimization_barrier(both(x))

    def renamed(x: jax.Array) -> Any:
        return [checkpoint_name(each, "n").astype(jnp.bfloat16) for each in both(x)]

    for function in (both, barred, jax.jit(both), jax.jit(barred), renamed):
        assert output_specs(jax.make_jaxpr(function)(X)) == [P("a"), P(None, "b")]

    def others(x: jax.Array) -> Any:
        return jnp.sin(kept(x, "a")), x, x.T, kept(kept(x, "a"), "b")

    assert output_specs(jax.make_jaxpr(others)(X)) == [P(), P(), P(), P("b")]


def test_axes_of_constraints_inside_others() -> None:
    def function(x: jax.Array) -> Any:
        y = jax.lax.scan(lambda y, _: (kept(y, ("a", "c")), None), x, length=2)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda: kept(y, None, "b"), lambda: y)

    assert constrained_axes(jax.make_jaxpr(function)(X)) == {"a", "b", "c"}
    assert constrained_axes(jax.make_jaxpr(lambda x: kept(x))(X)) == set()
    assert constrained_axes(jax.make_jaxpr(jnp.sin)(X)) == set()


def test_a_spec_without_axes_keeps_its_dims() -> None:
    spec = P("a", ("a", "b"), ("a", "b", "c"), None)
    assert spec_without(spec, "a") == P(None, "b", ("b", "c"), None)
    assert spec_without(spec, "a", "b") == P(None, None, "c", None)
    assert spec_without(spec, None) == spec
    assert [spec_axes(names) for names in spec] == [("a",), ("a", "b"), ("a", "b", "c"), ()]


@pytest.mark.parametrize(
    ("function", "dtype", "wanted"),
    [
        (lambda x: checkpoint_name(x, REDUCED), jnp.float32, (True, True)),
        (lambda x: checkpoint_name(x, REDUCED), jnp.complex64, (False, False)),
        (lambda x: checkpoint_name(x, "other"), jnp.float32, (False, False)),
        (lambda x: kept(x), jnp.float32, (False, True)),
        (lambda x: kept(x, None, ()), jnp.float32, (False, True)),
        (lambda x: kept(x), jnp.complex64, (False, False)),
        (lambda x: kept(x, "a"), jnp.float32, (False, False)),
        (lambda x: kept(x, None, "a"), jnp.float32, (False, False)),
        (jnp.sin, jnp.float32, (False, False)),
    ],
)
def test_what_recompute_keeps(function: Any, dtype: Any, wanted: tuple[bool, bool]) -> None:
    (eqn,) = jax.make_jaxpr(function)(X.astype(dtype)).jaxpr.eqns
    inputs = [x.aval for x in eqn.invars]
    assert (
        save_reduced(eqn.primitive, *inputs, **eqn.params),
        save_whole(eqn.primitive, *inputs, **eqn.params),
    ) == wanted
