"""One branch per distinct program."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.core.state import switch_stages, switch_table


def add(number: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x + number


@pytest.mark.parametrize(("numbers", "branches"), [([1, 1, 1], 0), ([1, 2, 1], 2), ([1, 2, 3], 3)])
def test_equal_programs_share_a_branch(numbers: list[int], branches: int) -> None:
    def run(stage: jax.Array, x: jax.Array) -> jax.Array:
        return switch_stages(stage, range(3), lambda stage, x: x + numbers[stage], x)

    assert [int(run(jnp.int32(stage), jnp.int32(10))) for stage in range(3)] == [
        10 + n for n in numbers
    ]
    found = [
        eqn
        for eqn in jax.make_jaxpr(run)(jnp.int32(0), jnp.int32(0)).eqns
        if eqn.primitive.name == "cond"
    ]
    assert [len(eqn.params["branches"]) for eqn in found] == ([branches] if branches else [])


def test_one_program_is_traced_once() -> None:
    traced: list[int] = []

    def run(stage: int, x: jax.Array) -> jax.Array:
        traced.append(stage)
        return x + 1

    assert int(switch_stages(jnp.int32(0), range(1), run, jnp.int32(10))) == 11
    assert traced == [0]


def test_a_table_says_which_branch_an_index_has() -> None:
    branches = [add(1), add(20), add(300)]
    assert [
        int(switch_table(jnp.int32(i), (2, 0, 2), branches, jnp.int32(0))) for i in range(3)
    ] == [300, 1, 300]
    traced = jax.make_jaxpr(lambda i: switch_table(i, (2, 0, 2), branches, jnp.int32(0)))(
        jnp.int32(0)
    )
    assert [len(e.params["branches"]) for e in traced.eqns if e.primitive.name == "cond"] == [2]
    assert "cond" not in str(
        jax.make_jaxpr(lambda i: switch_table(i, (1, 1), branches, jnp.int32(0)))(jnp.int32(0))
    )
