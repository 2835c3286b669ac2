"""Keys of programs and numbers of their values: equal if they compute the same."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.programs.jaxpr import program_key, value_numbers


def with_rule(scale: float) -> Callable[[jax.Array], jax.Array]:
    function = jax.custom_vjp(lambda x: jnp.sin(x))
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (scale * g,))
    return function


def test_keys_of_programs_that_differ_in_little() -> None:
    functions: list[Callable[..., Any]] = [
        lambda x, y: x - y,
        lambda x, y: y - x,
        lambda x, y: (x, x - y),
        lambda x, y: (x - y, x),
        lambda x, y: x * 0.0,
        lambda x, y: x * -0.0,
        lambda x, y: x * np.nan,
        lambda x, y: x.sum(0),
        lambda x, y: x.sum(1),
        lambda x, y: x + y.astype(jnp.bfloat16),
        lambda x, y: x + np.array([[0.0], [0.0]], np.float32),
        lambda x, y: x + np.array([[0.0], [-0.0]], np.float32),
        lambda x, y: jax.lax.sort(x, is_stable=True),
        lambda x, y: jax.lax.sort(x, is_stable=False),
    ]
    x = jnp.ones((2, 1))

    def keys() -> list[Any]:
        return [program_key(jax.make_jaxpr(function)(x, x)) for function in functions]

    first = keys()
    assert first == keys()
    assert len(set(first)) == len(first)


def test_rules_of_derivatives_are_no_part_of_a_key() -> None:
    one, other = (program_key(jax.make_jaxpr(with_rule(scale))(1.0)) for scale in (1.0, 2.0))
    assert one == other


def is_elementwise(
    function: Callable[..., Any], leaf: Any = "w", *, others: tuple[Any, ...] = ()
) -> bool:
    """Whether a slice of two rows is numbered like the whole of four, divided like `leaf`."""
    table: dict[Any, int] = {}
    found = []
    for rows in (4, 2):
        args = [jnp.ones((rows, rows)), *(jnp.ones((rows, rows)) for _ in others)]
        divided = ["w", *others]
        closed = jax.make_jaxpr(function)(*args)
        found.append(value_numbers(closed, ["g", *others], table, (divided, [leaf])))
    return found[0] == found[1]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: x.astype(jnp.bfloat16),
        lambda x: jnp.where(x > 0, x, jnp.zeros_like(x)),
        lambda x: x + jnp.full(x.shape, 3.0),
        jax.jit(lambda x: jnp.tanh(x) ** 2),
        lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x),
        lambda x: jnp.ones_like(x),
    ],
)
def test_elements_that_depend_on_those_at_their_place(function: Callable[..., Any]) -> None:
    assert is_elementwise(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.sum(),
        lambda x: x[::-1],
        lambda x: x.T,
        lambda x: jnp.cumsum(x, 0),
        lambda x: x * jnp.arange(len(x), dtype=x.dtype)[None],
        lambda x: x / len(x),
        lambda x: jnp.eye(len(x)),
        lambda x: jnp.arange(3.0),
    ],
)
def test_elements_that_depend_on_others_or_on_their_place(function: Callable[..., Any]) -> None:
    assert not is_elementwise(function)


def test_values_are_divided_like_one_array() -> None:
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    assert is_elementwise(product, others=("w",))
    assert not is_elementwise(product, others=("v",))
    assert not is_elementwise(jnp.sin, "v")
    # A whole value is none of a divided one, in whatever shape.
    assert not is_elementwise(jnp.sin, None)
    assert is_elementwise(lambda x: jnp.zeros(()), None)


def test_equal_elements_have_one_number_in_each_shape() -> None:
    def numbers(*values: Any) -> list[int]:
        return value_numbers(jax.make_jaxpr(lambda: [jnp.asarray(x) for x in values])(), [])

    zeros = np.zeros(3, np.float32)
    one, again, other, signed, half = numbers(
        *(zeros, zeros.copy(), np.zeros(4, np.float32), -zeros, np.array([0, -0.0, 0], np.float32))
    )
    assert one == again
    assert len({one, other, signed, half}) == 4
    nan = np.full(2, np.nan, np.float32)
    one, again = numbers(nan, nan.copy())
    assert one == again
