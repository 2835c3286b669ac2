from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep

from jaxpipe.optim import (
    OneCycle,
    WarmupCosineLR,
    WarmupLR,
    factory_schedules,
    hyperparam_schedules,
    make_optimizer,
    optimizer_lr,
    read_hyperparams,
    with_schedule,
)
from jaxpipe.optim._optax import optax_optimizers

PARAMS = {"kernel": jnp.arange(12.0).reshape(4, 3) / 7, "bias": jnp.ones(3)}
GRADS = {"kernel": jnp.cos(jnp.arange(12.0)).reshape(4, 3), "bias": jnp.array([0.5, -1.0, 0.0])}
NOT_FROM_JSON = {"lbfgs", "momo", "momo_adam", "sophia", "schedule_free", "dpsgd"}
DEPRECATED = {"optimistic_adam"}
NAMES = ["Adam", "AdamW", "Lamb", "Adagrad", "Lion", "SGD", "Muon"]
CYCLE = OneCycle(0.1, 0.2)


def _run(optimizer: optax.GradientTransformation, num_updates: int = 3) -> Any:
    params, state = PARAMS, optimizer.init(PARAMS)
    update = jax.jit(optimizer.update)
    for _ in range(num_updates):
        updates, state = update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _arguments(name: str) -> dict[str, Any]:
    extra = {"noisy_sgd": {"key": 0}, "galore": {"rank": 2}}
    return {"learning_rate": 0.01, **extra.get(name, {})}


OPTAX = sorted(
    name
    for name in optax_optimizers()
    if name.lower() not in {n.lower() for n in NAMES} | NOT_FROM_JSON | DEPRECATED
)


@pytest.mark.parametrize("name", sweep(8, [*OPTAX], rest=pytest.mark.slow))
def test_optax_optimizers_by_name(name: str) -> None:
    arguments = _arguments(name)
    actual, wanted = (
        _run(make_optimizer(name, arguments)),
        _run(optax_optimizers()[name](**arguments)),
    )
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_optax_arguments_are_used() -> None:
    arguments = {"learning_rate": 0.1, "decay": 0.5, "momentum": 0.3, "nesterov": True}
    actual, wanted = _run(make_optimizer("rmsprop", arguments)), _run(optax.rmsprop(**arguments))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), actual, wanted))


def test_a_callable_argument_is_no_schedule() -> None:
    def mask(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    actual = _run(make_optimizer("nadamw", {"learning_rate": 0.1, "mask": mask}))
    wanted = _run(optax.nadamw(0.1, mask=mask))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), actual, wanted))


@pytest.mark.parametrize("name", [*NAMES, "rmsprop", "adafactor", "nadamw"])
def test_a_schedule_decides_the_rate(name: str) -> None:
    schedule = WarmupLR(0.0, 0.1, 4, "linear")
    optimizer = make_optimizer(name, {}, schedule)
    state, rates = optimizer.init(PARAMS), []
    for _ in range(5):
        _, state = optimizer.update(GRADS, state, PARAMS)
        rates.append((read_hyperparams(state) or {})["learning_rate"])
    assert rates == pytest.approx([0, 0, 0.025, 0.05, 0.075])


@pytest.mark.parametrize("name", NAMES)
def test_states_keep_their_dtypes_and_shapes(name: str) -> None:
    optimizer = make_optimizer(name, {}, CYCLE)
    before = jax.eval_shape(optimizer.init, PARAMS)
    after = jax.eval_shape(optimizer.update, GRADS, before, PARAMS)[1]
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
        lambda x: (x.shape, x.dtype), after
    )


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_accept_a_stage_without_parameters(name: str) -> None:
    optimizer = make_optimizer(name, {}, CYCLE)
    updates, state = optimizer.update({}, optimizer.init({}), {})
    assert updates == {}
    assert (read_hyperparams(state) or {})["learning_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "params", "wanted"),
    [
        ("Adam", {}, {"b1": CYCLE.momentum}),
        ("lion", {"betas": [0.5, 0.6]}, {"b1": CYCLE.momentum}),
        ("Lamb", {}, {"b1": CYCLE.momentum}),
        ("SGD", {"momentum": 0.5}, {"momentum": CYCLE.momentum}),
        ("SGD", {}, {}),
        ("Adagrad", {}, {}),
        ("Muon", {}, {"adam_learning_rate": CYCLE}),
        ("nadam", {}, {"b1": CYCLE.momentum}),
        ("rmsprop", {}, {}),
        ("rmsprop", {"momentum": 0.5}, {"momentum": CYCLE.momentum}),
    ],
)
def test_which_hyperparameters_follow_one_cycle(
    name: str, params: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert hyperparam_schedules(name, params, CYCLE) == {"learning_rate": CYCLE, **wanted}
    assert hyperparam_schedules(name, params, None) == {}
    still = OneCycle(0.1, 0.2, cycle_momentum=False)
    assert set(hyperparam_schedules(name, params, still)) <= {"learning_rate", "adam_learning_rate"}


def test_muons_adam_follows_relative_schedules_by_its_own_rate() -> None:
    params = {"muon_lr": 0.1, "adam_lr": 0.2}
    for schedule in (WarmupCosineLR(9, lr=0.1), WarmupLR(lr=0.1)):
        followed = hyperparam_schedules("Muon", params, schedule)
        assert followed["adam_learning_rate"] == type(schedule)(**{**vars(schedule), "lr": 0.2})


@pytest.mark.parametrize(
    ("name", "params", "wanted"),
    [
        ("Adam", {}, 0.001),
        ("AdamW", {"lr": 0.5}, 0.5),
        ("Adagrad", {}, 0.01),
        ("Muon", {}, 0.02),
        ("Muon", {"lr": 0.3}, 0.3),
        ("Muon", {"lr": 0.3, "muon_lr": 0.4}, 0.4),
        ("rmsprop", {"learning_rate": 0.5}, 0.5),
        ("rmsprop", {}, None),
    ],
)
def test_the_optimizers_own_rate(name: str, params: dict[str, Any], wanted: float | None) -> None:
    assert optimizer_lr(name, params) == wanted


def test_frozen_parameters_are_accepted() -> None:
    assert (read_hyperparams(make_optimizer("Adam", {"betas": (0.5, 0.25)}).init(PARAMS)) or {})[
        "b1"
    ] == 0.5


@pytest.mark.parametrize(
    "key", ["foreach", "fused", "capturable", "differentiable", "set_grad_none"]
)
def test_tuning_of_pytorch_is_accepted_with_a_warning(key: str) -> None:
    with pytest.warns(
        UserWarning,
        match=rf"optimizer.params.{key} tunes PyTorch and has no effect here. Remove it.",
    ):
        make_optimizer("Adam", {key: True})


def test_a_factory_with_a_schedule() -> None:
    schedule = WarmupLR(0.1, 0.2, 4, "linear")
    factory = partial(optax.adamw, b1=0.8, mask={"kernel": True, "bias": False}, weight_decay=0.1)
    actual, wanted = _run(with_schedule(factory, schedule)), _run(factory(schedule))
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-5), actual, wanted))
    hyperparams = read_hyperparams(with_schedule(factory, schedule).init(PARAMS))
    assert hyperparams == {"learning_rate": pytest.approx(0.1), "b1": pytest.approx(0.8)}


def test_a_factory_with_one_cycle() -> None:
    assert factory_schedules(optax.adamw, CYCLE) == {"learning_rate": CYCLE, "b1": CYCLE.momentum}
    assert factory_schedules(optax.sgd, CYCLE) == {"learning_rate": CYCLE}
    assert factory_schedules(partial(optax.sgd, momentum=0.5), CYCLE) == {
        "learning_rate": CYCLE,
        "momentum": CYCLE.momentum,
    }
    state = with_schedule(optax.adamw, CYCLE).init(PARAMS)
    assert read_hyperparams(state) == {
        "learning_rate": pytest.approx(0.1),
        "b1": pytest.approx(0.8),
    }


def test_a_factory_may_be_any_function_of_the_rate() -> None:
    def factory(learning_rate: Any) -> optax.GradientTransformation:
        return optax.chain(optax.clip(0.1), optax.sgd(learning_rate))

    assert _run(with_schedule(factory, lambda count: 0.5**count))["bias"].tolist() == pytest.approx(
        [0.825, 1.175, 1]
    )
