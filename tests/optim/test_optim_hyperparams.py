from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.errors import ConfigError
from jaxpipe.optim import (
    OneCycle,
    WarmupLR,
    hyperparam_schedules,
    make_optimizer,
    next_hyperparams,
    read_hyperparams,
    set_hyperparams,
)

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
SCHEDULE = WarmupLR(0.1, 0.5, 4, "linear")


def _plain(optimizer: optax.GradientTransformation) -> Any:
    return optimizer.init(PARAMS)


def _in_rows(optimizer: optax.GradientTransformation) -> Any:
    """Two copies of a state, each with rows, as a pipeline keeps them."""
    rows = jax.tree.map(lambda x: jnp.stack([x] * 3), optimizer.init(PARAMS))
    return {"trunk": rows, "own": jax.tree.map(jnp.copy, rows)}


def _on_devices(optimizer: optax.GradientTransformation) -> Any:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:3]), "stage"), PartitionSpec("stage"))
    return jax.tree.map(lambda x: jax.device_put(x, sharding), _in_rows(optimizer))


LAYOUTS = pytest.mark.parametrize("place", [_plain, _in_rows, _on_devices])


@LAYOUTS
def test_hyperparameters_can_be_read_in_every_layout(place: Callable[..., Any]) -> None:
    state = place(make_optimizer("Adam", {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125}))
    assert read_hyperparams(state) == {
        "learning_rate": 0.25,
        "b1": 0.5,
        "b2": 0.75,
        "weight_decay": 0.125,
    }


@LAYOUTS
def test_setting_keeps_shapes_dtypes_and_places(place: Callable[..., Any]) -> None:
    before = place(make_optimizer("Adam", {"lr": 0.25}))
    after = set_hyperparams(before, learning_rate=0.5, b1=jnp.float32(0.75))
    values = read_hyperparams(after) or {}
    assert (values["learning_rate"], values["b1"]) == (0.5, 0.75)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype, old.weak_type, old.sharding) == (
            new.shape,
            new.dtype,
            new.weak_type,
            new.sharding,
        )
    assert (read_hyperparams(before) or {})["learning_rate"] == 0.25


def test_all_rows_of_all_copies_are_set() -> None:
    state = set_hyperparams(_in_rows(make_optimizer("SGD")), learning_rate=0.5)
    for group in state.values():
        assert group.hyperparams["learning_rate"].tolist() == [0.5] * 3


def test_what_is_set_is_used() -> None:
    optimizer = make_optimizer("SGD", {"lr": 0.25})
    state = set_hyperparams(optimizer.init(PARAMS), learning_rate=2.0)
    for _ in range(2):
        updates, state = jax.jit(optimizer.update)(
            jax.tree.map(jnp.ones_like, PARAMS), state, PARAMS
        )
        assert updates["b"].tolist() == [-2.0] * 3


def test_hyperparameters_can_be_read_and_set_while_tracing() -> None:
    @jax.jit
    def halve(state: Any) -> Any:
        return (read_hyperparams(state) or {})["learning_rate"], set_hyperparams(
            state, learning_rate=0.5
        )

    rate, state = halve(_in_rows(make_optimizer("SGD", {"lr": 0.25})))
    assert float(rate) == 0.25
    assert read_hyperparams(state) == {"learning_rate": 0.5, "weight_decay": 0.0}


def test_states_inside_states_are_found() -> None:
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    outer = optax.inject_hyperparams(lambda scale: optax.chain(optax.scale(scale), inner))(
        scale=2.0
    )
    state = (optax.MultiSteps(outer, 2).init(PARAMS), "text")
    assert read_hyperparams(state) == {"scale": 2.0, "learning_rate": 0.5}
    assert read_hyperparams(set_hyperparams(state, learning_rate=4.0)) == {
        "scale": 2.0,
        "learning_rate": 4.0,
    }


def test_array_hyperparameters_come_without_rows() -> None:
    optimizer = optax.inject_hyperparams(lambda weights: optax.scale(1.0))(
        weights=jnp.array([1.0, 2.0])
    )
    for place in (_plain, _in_rows, _on_devices):
        assert (read_hyperparams(place(optimizer)) or {})["weights"].tolist() == [1, 2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OtherState:
    count: Any
    hyperparams: Any


def test_any_state_with_hyperparameters_and_a_count_will_do() -> None:
    state = OtherState(jnp.int32(0), {"learning_rate": jnp.float32(0.5)})
    assert read_hyperparams(set_hyperparams(state, learning_rate=0.25)) == {"learning_rate": 0.25}


@LAYOUTS
def test_the_next_update_runs_with_the_next_value(place: Callable[..., Any]) -> None:
    cycle = OneCycle(0.125, 0.5, cycle_first_step_size=4)
    schedules = hyperparam_schedules("Adam", {}, cycle)
    optimizer = make_optimizer("Adam", {}, cycle)
    state = optimizer.init(PARAMS)
    for count in range(6):
        coming = next_hyperparams(
            place(optax.GradientTransformation(lambda _, s=state: s, optimizer.update)), schedules
        )
        assert coming is not None
        assert coming["learning_rate"] == float(cycle(count))
        assert coming["b1"] == float(cycle.momentum(count))
        _, state = optimizer.update(PARAMS, state, PARAMS)
        used = read_hyperparams(state)
        assert used is not None
        assert (used["learning_rate"], used["b1"]) == (coming["learning_rate"], coming["b1"])


def test_a_value_that_is_not_scheduled_is_the_next_one() -> None:
    state = set_hyperparams(make_optimizer("SGD", {"lr": 0.25}).init(PARAMS), learning_rate=0.5)
    assert next_hyperparams(state, {"learning_rate": SCHEDULE}) == {
        "learning_rate": 0.5,
        "weight_decay": 0.0,
    }


def test_states_without_hyperparameters() -> None:
    for optimizer in (
        optax.adam(0.1),
        optax.chain(optax.clip(1.0), optax.sgd(0.1)),
        optax.identity(),
    ):
        state = optimizer.init(PARAMS)
        assert read_hyperparams(state) is None
        assert next_hyperparams(state, {"learning_rate": SCHEDULE}) is None
        with pytest.raises(
            ConfigError,
            match=r"must lie in the optimizer's state .* got learning_rate=0.5 and .*Make t",
        ):
            set_hyperparams(state, learning_rate=0.5)


def test_other_hyperparameters_may_be_negative() -> None:
    state = optax.inject_hyperparams(optax.scale)(step_size=1.0).init(PARAMS)
    assert read_hyperparams(set_hyperparams(state, step_size=-0.5)) == {"step_size": -0.5}
