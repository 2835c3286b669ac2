"""Parts of programs: what some values need, what depends on them, and what a part computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.programs.jaxpr import (
    Program,
    all_equations,
    computed_by,
    effects_of,
    evaluate,
    flatten,
    needed_for,
    reached_from,
    scan_form,
    value_of,
    without_mesh,
)

X = np.arange(1.0, 4.0, dtype=np.float32)


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    return flatten(jax.make_jaxpr(function)(*args or (X,)))


def run(program: Program, wanted: list[Any], *args: Any) -> list[jax.Array]:
    """Only what these values need."""
    part = needed_for(program, wanted)
    values, _ = evaluate(program, dict(zip(program.inputs, args, strict=True)), part, {}, [])
    return [value_of(values, x) for x in wanted]


def names(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in program.eqns]


def carries(x: jax.Array) -> Any:
    """`b` needs `a`, which needs `c` of the step before, and `d` needs nothing."""

    def step(carry: Any, _: None) -> Any:
        a, b, c, d = carry
        return (a + c, b * a, 2 * c, d + 1), d

    return jax.lax.scan(step, (x, x, x, x), length=3)


def test_carries_that_a_carry_needs_run_too() -> None:
    program = program_of(carries)
    (a, b, c, d), ds = carries(jnp.asarray(X))
    for place, value in enumerate((a, b, c, d, ds)):
        (found,) = run(program, [program.outputs[place]], X)
        np.testing.assert_array_equal(found, value)
    (scan,) = program.scans.values()

    def needed(place: int) -> list[bool]:
        part = needed_for(program, [program.outputs[place]])
        return [carry.inner in part.variables for carry in scan.carried]

    # Of `d` its own body only, and of `b` all but `d`.
    assert [needed(place) for place in range(5)] == [
        [True, False, True, False],
        [True, True, True, False],
        [False, False, True, False],
        [False, False, False, True],
        [False, False, False, True],
    ]


def test_what_depends_on_a_carry() -> None:
    program = program_of(carries)
    (scan,) = program.scans.values()
    a, b, c, d = (carry.inner for carry in scan.carried)

    def reached(*found: Any, blocked: tuple[Any, ...] = ()) -> list[bool]:
        some = reached_from(program, set(found), blocked=blocked)
        return [x in some for x in program.outputs]

    assert reached(a) == [True, True, False, False, False]
    assert reached(b) == [False, True, False, False, False]
    assert reached(c) == [True, True, True, False, False]
    assert reached(d) == [False, False, False, True, True]
    # What is blocked passes nothing on, neither in its step nor to the next one.
    assert reached(c, blocked=(a,)) == [True, False, True, False, False]
    assert not any(x in reached_from(program, {c}, blocked=(a,)) for x in (a, b))


def test_equations_start_with_the_number_of_their_runs() -> None:
    def nested(x: jax.Array) -> Any:
        def outer(y: jax.Array, _: None) -> Any:
            inner = jax.lax.scan(lambda z, _: (jnp.sin(z), None), y, length=5)[0]
            return jnp.cos(inner), None

        return jnp.tanh(jax.lax.scan(outer, x, length=3)[0])

    program = program_of(nested)
    seen: dict[str, int] = {}

    def starts(eqn: Any, times: int) -> bool:
        seen[eqn.primitive.name] = times
        return eqn.primitive.name == "sin"

    reached = reached_from(program, set(), starts)
    assert {name: seen[name] for name in ("sin", "cos", "tanh")} == {"sin": 15, "cos": 3, "tanh": 1}
    assert set(program.outputs) <= reached
    assert not reached.intersection(program.inputs)


def test_of_a_barrier_only_what_is_needed_is_computed() -> None:
    program = program_of(lambda x: jax.lax.optimization_barrier((jnp.sin(x), jnp.cos(x))))
    first, second = program.outputs
    part = needed_for(program, [second])
    assert {first, second} & computed_by(program, part) == {second}
    values, _ = evaluate(program, {program.inputs[0]: X}, part, {}, [])
    assert first not in values
    np.testing.assert_allclose(values[second], jnp.cos(X))
    assert names(program) == ["sin", "cos", "optimization_barrier"]


def test_given_values_stay_and_spare_what_made_them() -> None:
    program = program_of(lambda x: (jnp.sin(x) + 1, jnp.sin(x)))
    (sin, *_) = (eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "sin")
    given = {sin: jnp.asarray(10 * X)}
    part = needed_for(program, program.outputs, given)
    values, taken = evaluate(program, {program.inputs[0]: X}, part, given, [sin])
    assert taken[sin] is given[sin]
    made = program.eqns[[eqn.outvars[0] for eqn in program.eqns].index(sin)]
    assert id(made) not in part.steps
    # One that runs nevertheless replaces nothing.
    forced = needed_for(program, program.outputs, given, {id(made)})
    again, _ = evaluate(program, {program.inputs[0]: X}, forced, given, [])
    for found in (values, again):
        np.testing.assert_array_equal(value_of(found, program.outputs[0]), 10 * X + 1)


def test_effects_let_their_loops_run() -> None:
    def noted(x: jax.Array) -> Any:
        def step(y: jax.Array, _: None) -> Any:
            jax.debug.callback(lambda _: None, y)
            return jnp.sin(y), None

        quiet = jax.lax.scan(lambda y, _: (jnp.cos(y), None), x, length=2)[0]
        return jax.lax.scan(step, x, length=2)[0] + quiet

    program = program_of(noted)
    quiet, loud = program.scans
    (callback,) = (
        eqn
        for eqn in all_equations(program.scans[loud].body.eqns)
        if "callback" in eqn.primitive.name
    )
    assert effects_of(program) == {id(program.eqns[loud]), id(callback)}
    assert effects_of(program.scans[quiet].body) == set()


def test_collectives_have_no_side_effects() -> None:
    found: list[set[int]] = []

    def inside(x: jax.Array) -> jax.Array:
        found.append(effects_of(program_of(lambda x: jax.lax.psum(x, "x"), x)))
        return x

    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    jax.eval_shape(
        jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), X
    )
    assert found == [set()]


@pytest.mark.parametrize(
    ("dtype", "bits", "is_kept"),
    [
        (jnp.float32, (8, 23), False),
        (jnp.float32, (8, 7), True),
        (jnp.bfloat16, (8, 7), True),  # XLA may have computed more bits
        (jnp.float16, (5, 10), True),
    ],
)
def test_roundings_that_change_nothing_are_left_out(
    dtype: Any, bits: tuple[int, int], *, is_kept: bool
) -> None:
    program = program_of(lambda x: jax.lax.reduce_precision(x, *bits) + 1, jnp.ones(3, dtype))
    assert ("reduce_precision" in names(program)) == is_kept


def test_moves_to_another_memory_are_left_out_unless_they_are_asked_for() -> None:
    def moved(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Host) + 1

    closed = jax.make_jaxpr(moved)(X)
    assert names(flatten(closed)) == ["add"]
    assert names(flatten(closed, moves=True)) == ["device_put", "add"]


def test_a_program_without_its_mesh_runs_on_one_device() -> None:
    """Also the bodies of its scans, and with keys among its constants."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    key = jax.random.key(3)

    def kept(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("a")))

    def function(x: jax.Array) -> Any:
        y = jax.lax.scan(lambda y, _: (kept(y) * 2, None), kept(x), length=2)[0]
        return y + jax.random.normal(key, x.shape)

    x = jnp.arange(4.0)
    program = without_mesh(program_of(function, x))
    eqns = [*program.eqns, *(eqn for scan in program.scans.values() for eqn in scan.body.eqns)]
    assert "sharding_constraint" not in [eqn.primitive.name for eqn in eqns]
    assert [scan_form(eqn) is not None for eqn in program.eqns].count(True) == 1
    (found,) = run(program, list(program.outputs), x)
    np.testing.assert_allclose(found, 4 * x + jax.random.normal(key, x.shape), rtol=1e-6)
    assert len(found.devices()) == 1
