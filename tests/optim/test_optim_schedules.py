from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from _covering import sweep

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


@pytest.mark.parametrize(("name", "params"), sweep(4, OPTAX, unpack=True, rest=pytest.mark.slow))
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
