"""Roundings of traced programs: how many in a row, in which dtype, and which reach a result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.programs.jaxpr import arithmetic_of

X = jnp.ones((4, 16))


def rounded(x: jax.Array) -> jax.Array:
    return jnp.sin(x.astype(jnp.bfloat16)).astype(x.dtype)


def chosen(x: jax.Array) -> jax.Array:
    """The roundings to bfloat16 only decide between exact values."""
    return jnp.where(rounded(x) > 0, x, -x)


def unused(x: jax.Array) -> jax.Array:
    del_me = rounded(x)
    del del_me
    return jnp.sin(x)


def scanned(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=50)[0]


def convolved(x: jax.Array) -> jax.Array:
    kernel = jnp.ones((3, 16, 5))
    return jax.lax.conv_general_dilated(
        x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


@jax.custom_vjp
def with_residual(x: jax.Array, extra: jax.Array) -> jax.Array:
    del extra
    return jnp.sin(x)


with_residual.defvjp(
    lambda x, extra: (jnp.sin(x), (x, extra)),
    lambda kept, grad: (grad * jnp.cos(kept[0]), None),
)


@pytest.mark.parametrize(
    ("function", "dtype", "least", "most"),
    [
        (lambda x: x @ x.T, np.float32, 16, 18),
        (lambda x: x.astype(jnp.bfloat16) @ jnp.ones((16, 64), jnp.bfloat16), jnp.bfloat16, 2, 4),
        (rounded, jnp.bfloat16, 2, 3),
        (chosen, np.float32, 1, 4),
        (unused, np.float32, 1, 2),
        (scanned, np.float32, 50, 53),
        (convolved, np.float32, 48, 51),
        (jax.jit(lambda x: x.mean(1)), np.float32, 16, 19),
        (lambda x: with_residual(x, rounded(x)), np.float32, 1, 2),
        (lambda x: x, np.float32, 1, 1),
    ],
)
def test_roundings(function: Callable[..., Any], dtype: Any, least: int, most: int) -> None:
    found = arithmetic_of([jax.make_jaxpr(function)(X)])
    assert found.dtype == dtype
    assert least <= found.operations <= most
    assert found.unit == float(jnp.finfo(dtype).eps) / 2


def long(x: jax.Array) -> jax.Array:
    """A million roundings to float32."""
    return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=2**20)[0]


def test_wider_roundings_count_by_the_square_of_their_unit() -> None:
    """That is 2 ** -32 of one to bfloat16, of which there is one here."""
    found = arithmetic_of([jax.make_jaxpr(lambda x: long(x).astype(jnp.bfloat16))(X)])
    assert found.dtype == jnp.bfloat16
    assert found.operations == pytest.approx(1 + 2**20 / 2**32, rel=1e-4)


def test_what_a_layer_reports_beside_its_arrays_is_not_counted() -> None:
    def reporting(x: jax.Array) -> Any:
        return x, long(x).astype(jnp.bfloat16).sum()

    found = arithmetic_of([jax.make_jaxpr(reporting)(X)])
    assert found == (np.float32, 1.0)
    # The loss itself, which reports nothing else, is.
    alone = arithmetic_of([jax.make_jaxpr(lambda x: long(x).mean())(X)])
    assert alone.operations > 2**20


def test_the_worst_of_several_programs_decides() -> None:
    programs = [jax.make_jaxpr(f)(X) for f in (jnp.sin, lambda x: x @ x.T, jnp.cos)]
    assert arithmetic_of(programs) == arithmetic_of(programs[1:2])
    assert arithmetic_of([]) == (np.float64, 1.0)
