"""Regions that a cut decides about: those with more than arithmetic, or with a policy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.programs.autodiff._regions import arrange, find_regions
from jaxpipe.programs.jaxpr import save_reduced

X = jnp.arange(6.0).reshape(2, 3)
W = jnp.ones((3, 3))
NAMED = jax.checkpoint_policies.save_only_these_names("kept")


def arithmetic(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(x) - x.mean(axis=-1, keepdims=True)


def product(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ W)


def kinds(function: Callable[[jax.Array], Any]) -> list[int]:
    """How many regions of each kind a function has."""
    return [len(ids) for ids in find_regions(jax.make_jaxpr(function)(X))]


@pytest.mark.parametrize(
    ("body", "policy", "found"),
    [
        (product, None, [1]),
        (product, NAMED, [1]),
        (arithmetic, None, []),
        (arithmetic, save_reduced, []),
        (arithmetic, NAMED, [1]),
    ],
    ids=["product", "named product", "arithmetic", "reduced arithmetic", "named arithmetic"],
)
def test_arithmetic_is_no_region_unless_the_user_says_what_it_keeps(
    body: Callable[[jax.Array], jax.Array], policy: Any, found: list[int]
) -> None:
    assert kinds(jax.checkpoint(body, policy=policy)) == found


def test_equal_regions_are_of_one_kind_wherever_they_are() -> None:
    region = jax.checkpoint(product)
    other = jax.checkpoint(lambda x: product(product(x)))

    def function(x: jax.Array) -> jax.Array:
        x = other(region(x))
        x, _ = jax.lax.scan(lambda x, _: (region(x), None), x, None, length=3)
        return jax.lax.cond(x.sum() > 0, region, lambda x: x, x)

    assert sorted(kinds(function)) == [1, 3]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_region_that_is_not_chosen_is_inlined_and_computes_the_same(keeps: bool) -> None:
    function = jax.checkpoint(product)
    closed = jax.make_jaxpr(function)(X)
    chosen = set().union(*find_regions(closed)) if keeps else set[int]()
    arranged = arrange(closed, chosen)
    assert kinds(lambda x: arranged(x)[0]) == ([1] if keeps else [])
    assert (arranged(X)[0] == function(X)).all()
