from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import ConfigError
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


@pytest.mark.parametrize("name", OPTAX)
def test_optax_optimizers_by_name(name: str) -> None:
    arguments = _arguments(name)
    actual, wanted = (
        _run(make_optimizer(name, arguments)),
        _run(optax_optimizers()[name](**arguments)),
    )
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(NOT_FROM_JSON))
def test_optimizers_that_need_more_than_gradients_are_refused(name: str) -> None:
    arguments = {} if name == "lbfgs" else {"learning_rate": 0.01}
    with pytest.raises(
        ConfigError, match=r"optimizer.params must be|optimizer.params.* must be given, but"
    ):
        make_optimizer(name, arguments)


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


BAD_BETAS = [0.9, [0.9], [0.9, 1.0], [-0.1, 0.9], "0.9", ["a", 0.9], None]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lamb", "Lion", "Muon"])
@pytest.mark.parametrize("value", BAD_BETAS)
def test_wrong_betas_are_refused_by_path(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer.params.betas(\[[01]\])? must be a .*, but got .*Use "
    ):
        make_optimizer(name, {"betas": value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["0.1", True, -1, [0.1], float("nan")])
def test_wrong_numbers_are_refused_by_path(name: str, value: Any) -> None:
    for key in ("lr", "weight_decay"):
        with pytest.raises(
            ConfigError,
            match=rf"optimizer.params.{key} must be a finite number .*Use a number such as",
        ):
            make_optimizer(name, {key: value})


@pytest.mark.parametrize("name", NAMES)
def test_clipping_is_refused_with_the_key_that_does_it(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"optimizer.params.max_grad_norm must not be set: .*=1.0. Use gradient_clipp",
    ):
        make_optimizer(name, {"max_grad_norm": 1.0})


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        (
            "Adam",
            {"learning_rate": 1},
            r"optimizer.params.learning_rate is not a known key. Remove it, or use one ",
        ),
        (
            "Adam",
            {"wieght_decay": 1},
            r"optimizer.params.wieght_decay is not .* Did you mean optimizer.params.weight_dec",
        ),
        (
            "Adam",
            {1: 1},
            r"A key of optimizer.params must be a string, but got key=1. Write it in quotes",
        ),
        (
            "Adam",
            {"adam_w_mode": 0},
            r"optimizer.params.adam_w_mode must be true or false, .*=0. Use true or false",
        ),
        (
            "Adam",
            {"eps": None},
            r"optimizer.params.eps must be a finite number .*=None. Use a number",
        ),
        (
            "Adam",
            {"fused": "yes"},
            r"optimizer.params.fused must be true or false, .*='yes'. Use true or",
        ),
        (
            "AdamW",
            {"adam_w_mode": False},
            r"optimizer.params.adam_w_mode must be true with .*AdamW.*=False. Use optimiz",
        ),
        (
            "SGD",
            {"nesterov": True},
            r"optimizer.params.nesterov must be false with momentum=0 .*=True. Set optimizer.para",
        ),
        (
            "SGD",
            {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
            r"with momentum=0.9 and dampening=0.1, .*=True. Set ",
        ),
        ("SGD", {"betas": [0.9, 0.9]}, r"optimizer.params.betas is not a known key"),
        (
            "Lamb",
            {"amsgrad": True},
            r"optimizer.params.amsgrad must not be set: .*=True. Remove the key",
        ),
        (
            "Lamb",
            {"min_coeff": 11},
            r"optimizer.params.min_coeff must be at most max_coeff=10.0, .*=11.0. Swap the two",
        ),
        (
            "Muon",
            {"per_head_muon": True},
            r"optimizer.params.per_head_muon must not be set: .*Remove the key",
        ),
        (
            "Muon",
            {"ns_method": "gramm"},
            r"optimizer.params.ns_method must be one of 'gram', 'standard', .*Use 'gram",
        ),
        (
            "Muon",
            {"momentum": 1},
            r"optimizer.params.momentum must be .* below 1, .*=1. Use a number",
        ),
        (
            "AdanW",
            {},
            r"optimizer.type must be one of .*AdamW.*adan.*, but got optimizer.type='AdanW'. Did "
            r"you mean '[Aa]d",
        ),
        (
            "RMSprop",
            {},
            r"optimizer.type must be one of .*, but got optimizer.type='RMSprop'. Did you mean "
            r"'rmsprop'\?",
        ),
        (
            "OneBitAdam",
            {},
            r"optimizer.type must be one of .*, but got optimizer.type='OneBitAdam'",
        ),
        (
            3,
            {},
            r"optimizer.type must be one of .*, but got optimizer.type=3. Use one of these names",
        ),
        (
            "rmsprop",
            {"learning_rate": 0.1, "lr": 1},
            r"optimizer.params.lr is not a known key",
        ),
        (
            "rmsprop",
            {"learning_rate": 0.1, "deccay": 1},
            r"params.deccay is not .*Did you mean optimizer.params.decay",
        ),
        (
            "rmsprop",
            {},
            r"optimizer.params.learning_rate must be given, .*={}. Add the key 'learning_rate'",
        ),
        (
            "rmsprop",
            {"learning_rate": "x"},
            r"optimizer.params must be arguments that optax's rmsprop accepts.*'x'.*Corr",
        ),
        (
            "rmsprop",
            {"learning_rate": 0.1, "decay": "x"},
            r"optimizer.params must be arguments .* accepts.*'x'.*Correct",
        ),
    ],
)
def test_wrong_descriptions_are_refused(name: str, params: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_optimizer(name, params)


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


@pytest.mark.parametrize("factory", [optax.scale, optax.adam(0.1), 3])
def test_a_factory_must_take_a_rate(factory: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"must be made by a function of learning_rate, but got .*Pass for instance op",
    ):
        with_schedule(factory, WarmupLR(lr=0.1))
