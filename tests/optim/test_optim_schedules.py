from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.optim import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_schedule,
)
from jaxpipe.optim._optax import optax_schedules

CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
OPTAX: list[tuple[str, dict[str, Any]]] = [
    ("constant_schedule", {"value": 0.5}),
    ("cosine_decay_schedule", {"init_value": 1.0, "decay_steps": 10, "alpha": 0.1}),
    ("cosine_onecycle_schedule", {"transition_steps": 10, "peak_value": 1.0}),
    ("exponential_decay", {"init_value": 1.0, "transition_steps": 3, "decay_rate": 0.5}),
    ("linear_onecycle_schedule", {"transition_steps": 10, "peak_value": 1.0}),
    ("linear_schedule", {"init_value": 1.0, "end_value": 0.0, "transition_steps": 4}),
    ("piecewise_constant_schedule", {"init_value": 1.0, "boundaries_and_scales": {"2": 0.5}}),
    (
        "piecewise_interpolate_schedule",
        {"interpolate_type": "linear", "init_value": 1.0, "boundaries_and_scales": {"4": 0.5}},
    ),
    (
        "polynomial_schedule",
        {"init_value": 1.0, "end_value": 0.0, "power": 2, "transition_steps": 4},
    ),
    (
        "sgdr_schedule",
        {
            "cosine_kwargs": (
                {"init_value": 0.0, "peak_value": 1.0, "decay_steps": 5, "warmup_steps": 2},
            )
        },
    ),
    ("warmup_constant_schedule", {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 2}),
    (
        "warmup_cosine_decay_schedule",
        {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 2, "decay_steps": 9},
    ),
    (
        "warmup_exponential_decay_schedule",
        {
            "init_value": 0.0,
            "peak_value": 1.0,
            "warmup_steps": 2,
            "transition_steps": 9,
            "decay_rate": 0.5,
        },
    ),
]


@pytest.mark.parametrize(
    ("name", "params", "wanted"),
    [
        ("LRRangeTest", {}, LRRangeTest()),
        ("OneCycle", CYCLE, OneCycle(0.1, 0.2)),
        ("WarmupLR", {}, WarmupLR(lr=0.7)),
        ("WarmupLR", {"warmup_max_lr": 0.3}, WarmupLR(0.0, 0.3, lr=0.7)),
        ("WarmupDecayLR", {"total_num_steps": 9}, WarmupDecayLR(9)),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9, "cos_min_ratio": 0.5},
            WarmupCosineLR(9, cos_min_ratio=0.5, lr=0.7),
        ),
    ],
)
def test_deepspeeds_schedules_by_name(name: str, params: dict[str, Any], wanted: Any) -> None:
    assert make_schedule(name, params, 0.7) == wanted


def test_parameters_may_be_absent() -> None:
    assert make_schedule("LRRangeTest", None) == LRRangeTest()


@pytest.mark.parametrize(("name", "params"), OPTAX)
def test_optax_schedules_by_name(name: str, params: dict[str, Any]) -> None:
    schedule = make_schedule(name, params)
    plain = dict(params)
    if "boundaries_and_scales" in plain:
        plain["boundaries_and_scales"] = {
            int(k): v for k, v in plain["boundaries_and_scales"].items()
        }
    wanted = getattr(optax, name)(**plain)
    for count in range(12):
        rate = jax.jit(schedule)(count)
        assert jnp.asarray(rate).dtype == jnp.float32
        assert float(rate) == pytest.approx(float(wanted(count)), rel=1e-6, abs=1e-7)


def test_all_of_optaxs_schedules_are_known() -> None:
    assert {name for name, _ in OPTAX} == set(optax_schedules())


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        (
            "WarmupLr",
            {},
            r"scheduler.type must be one of .*OneCycle.*but got .*='WarmupLr'. Did you mean "
            r"'WarmupLR'\?",
        ),
        (
            "cosine_decay",
            {},
            r"got scheduler.type='cosine_decay'. Did you mean 'cosine_decay_schedule'\?",
        ),
        ("StepLR", {}, r"scheduler.type must be one of .*, but got scheduler.type='StepLR'"),
        (
            7,
            {},
            r"scheduler.type must be one of .*, but got scheduler.type=7. Use one of these names",
        ),
        (
            "WarmupLR",
            {"warmup_steps": 4},
            r"params.warmup_steps is not a known .* mean scheduler.params.warmup_num_st",
        ),
        ("WarmupLR", {"lr": 4}, r"params.lr is not a known key. "),
        (
            "LRRangeTest",
            {"zzz": 4},
            r"params.zzz is not a known key. Remove it, or use one of .*lr_range_test_mi",
        ),
        (
            "LRRangeTest",
            {4: 4},
            r"A key of scheduler.params must be a string, but got key=4. Write it in quotes",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1},
            r"params.cycle_max_lr must be given, but .*Add the key 'cycle_max_lr' there",
        ),
        (
            "WarmupDecayLR",
            {},
            r"params.total_num_steps must be given, .*={}. Add the key 'total_num_steps'",
        ),
        (
            "constant_schedule",
            {},
            r"params.value must be given, .*={}. Add the key 'value'",
        ),
        (
            "constant_schedule",
            {"valu": 1},
            r"params.valu is not a known key. Did you mean scheduler.params.value",
        ),
        (
            "constant_schedule",
            {"value": [1, 2]},
            r"must give one rate per update, .*shape=\(2,\) from constant_sch.*Use",
        ),
        (
            "cosine_decay_schedule",
            {"init_value": 1.0, "decay_steps": "x"},
            r"arguments that optax's cosine.*'x'.*Corr",
        ),
        (
            "piecewise_constant_schedule",
            {"init_value": 1.0, "boundaries_and_scales": {"x": 1}},
            r"accepts, but got .*x",
        ),
    ],
)
def test_wrong_descriptions_are_refused(name: str, params: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_schedule(name, params, 0.1)


def test_warmup_must_know_what_it_rises_to() -> None:
    with pytest.raises(
        ConfigError,
        match=r"scheduler.params.warmup_max_lr must be a number if .* or optimizer.param",
    ):
        make_schedule("WarmupLR", {})
