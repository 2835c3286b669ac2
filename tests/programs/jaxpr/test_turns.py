"""Results that leave a program while the rest of it runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.programs.jaxpr import evaluate, flatten, needed_for, turns_of, value_of

X = np.arange(1.0, 4.0, dtype=np.float32)


def chain(x: jax.Array) -> list[jax.Array]:
    """A result of each of three steps, and the last value.

    The last step also reads what the first one made.
    """
    a = jnp.sin(x)
    results = [2 * a]
    b = jnp.cos(a)
    results.append(2 * b)
    c = jnp.tanh(b) + a
    return [*results, 2 * c, c]


def run(x: jax.Array, groups: list[list[int]], handed: list[int] | None = None) -> list[jax.Array]:
    program = flatten(jax.make_jaxpr(chain)(X))
    part = needed_for(program, program.outputs)
    places = {var: i for i, var in enumerate(program.outputs)}

    def hand_over(var: Any, value: jax.Array) -> jax.Array:
        if handed is not None:
            handed.append(places[var])
        return value

    turns = turns_of(
        program, part, [[program.outputs[i] for i in group] for group in groups], hand_over
    )
    values, _ = evaluate(program, dict(zip(program.inputs, [x], strict=True)), part, {}, [], turns)
    return [value_of(values, var) for var in program.outputs]


@pytest.mark.parametrize(
    "groups", [[], [[0], [1], [2]], [[2], [0, 1]], [[0, 1, 2]], [[3, 0], []]], ids=str
)
def test_no_value_changes(groups: list[list[int]]) -> None:
    jax.tree.map(np.testing.assert_array_equal, run(jnp.asarray(X), groups), chain(jnp.asarray(X)))


def test_each_leaves_when_it_is_complete() -> None:
    handed: list[int] = []
    run(jnp.asarray(X), [[2], [0], [1]], handed)
    assert handed == [0, 1, 2]


def test_what_follows_a_group_waits_for_the_one_before_it() -> None:
    jaxpr = jax.make_jaxpr(lambda x: run(x, [[0], [1], [2]]))(X).jaxpr
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    first, second = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier")
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    assert [made[var].primitive.name for var in first.invars] == ["sin", "cos", "mul"], (
        "what c is made of, and 2 * a"
    )
    assert names.index("tanh") > names.index("optimization_barrier")
    assert made[second.invars[-1]].primitive.name == "mul"
