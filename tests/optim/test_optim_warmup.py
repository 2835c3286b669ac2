import math
from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.optim import LRRangeTest, LRSchedule, WarmupCosineLR, WarmupDecayLR, WarmupLR

NUM_UPDATES = 40


def _trace(schedule: LRSchedule, num_updates: int = NUM_UPDATES) -> list[float]:
    return [float(x) for x in schedule(jnp.arange(num_updates))]


def _risen(iteration: int, steps: int, warmup_type: str) -> float:
    return math.log(iteration + 1) / math.log(steps) if warmup_type == "log" else iteration / steps


def _assert_rates(schedule: LRSchedule, last: int, wanted: Callable[[int], float]) -> None:
    """Compare the updates' rates with those of the iterations, of which the first is `last`."""
    rates = [wanted(iteration) for iteration in range(last, last + NUM_UPDATES)]
    limits = {"rtol": 2e-6, "atol": 1e-6 * max(rates)}
    np.testing.assert_allclose(_trace(schedule), rates, **limits, err_msg=repr(schedule))


STEPS = [0, 1, 2, 3, 4, 17]
TYPES = ["log", "linear"]
LOWS = [0.0, 0.02]
LASTS = [-1, 0, 5]


def test_warmup_rises_and_stays() -> None:
    def wanted(iteration: int, steps: int, warmup_type: str, low: float) -> float:
        length = max(steps, 2)
        if iteration <= 0:
            return low
        if iteration >= length:
            return 0.1
        return low + (0.1 - low) * _risen(iteration, length, warmup_type)

    for steps, kind, low, last in product(STEPS, TYPES, LOWS, LASTS):
        schedule = WarmupLR(low, 0.1, steps, kind, last)
        _assert_rates(schedule, last, lambda i, case=(steps, kind, low): wanted(i, *case))


def test_warmup_as_deepspeed_applies_it() -> None:
    assert [round(x, 6) for x in _trace(WarmupLR(0.0, 0.1, 4, "linear"), 7)] == [
        0,
        0,
        0.025,
        0.05,
        0.075,
        0.1,
        0.1,
    ]
    logarithmic = _trace(WarmupLR(0.0, 0.1, 4), 6)
    assert [round(x, 6) for x in logarithmic] == [0, 0, 0.05, 0.079248, 0.1, 0.1]


def test_warmup_rises_to_the_optimizers_rate() -> None:
    assert _trace(WarmupLR(warmup_num_steps=3, lr=0.3)) == _trace(WarmupLR(0.0, 0.3, 3))
    assert _trace(WarmupLR(0.0, 0.0, 3, lr=0.3)) == [0.0] * NUM_UPDATES


@pytest.mark.parametrize("total", [1, 4, 25])
def test_warmup_decay_falls_in_a_line(total: int) -> None:
    def wanted(iteration: int, steps: int, warmup_type: str, low: float) -> float:
        length = max(steps, 2)
        share = 0.0 if iteration < 0 else _risen(iteration, length, warmup_type)
        if iteration >= length:
            span = total - length if total - length > 1 else 1
            share = (total - iteration) / span if iteration < total else 0.0
        return low + (0.1 - low) * share

    for steps, kind, low, last in product(STEPS, TYPES, LOWS, LASTS):
        schedule = WarmupDecayLR(total, low, 0.1, steps, kind, last)
        _assert_rates(schedule, last, lambda i, case=(steps, kind, low): wanted(i, *case))


def test_warmup_decay_by_hand() -> None:
    trace = _trace(WarmupDecayLR(6, 0.0, 0.1, 2, "linear"), 9)
    assert [round(x, 6) for x in trace] == [0, 0, 0.05, 0.1, 0.075, 0.05, 0.025, 0, 0]


@pytest.mark.parametrize("total", [1, 4, 25])
def test_warmup_cosine_falls_along_half_a_cosine(total: int) -> None:
    def wanted(iteration: int, steps: int, warmup_type: str, low: float) -> float:
        length = max(steps, 2)
        if iteration < 0:
            return 0.0
        if iteration < length:
            return 0.2 * (low + (1 - low) * _risen(iteration, length, warmup_type))
        progress = (iteration - length + 1) / (total - length) if total - length >= 1 else 1.0
        return 0.2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))

    for steps, kind, low, last in product(STEPS, TYPES, LOWS, LASTS):
        schedule = WarmupCosineLR(total, low, steps, 0.1, kind, last, lr=0.2)
        _assert_rates(schedule, last, lambda i, case=(steps, kind, low): wanted(i, *case))


def test_the_first_cosine_update_has_rate_zero_and_the_second_the_start_ratio() -> None:
    trace = _trace(WarmupCosineLR(10, 0.25, 4, warmup_type="linear", lr=1.0), 3)
    assert trace == [0.0, 0.25, pytest.approx(0.4375)]


def test_range_test_rises_without_end() -> None:
    def wanted(iteration: int, size: int, rate: float, staircase: bool) -> float:
        batches = iteration + 1
        return 0.01 + 0.01 * rate * (batches // size if staircase else batches / size)

    for size, rate, staircase, last in product([1, 2, 7], [0.0, 1.0, 2.5], [False, True], [-1, 3]):
        schedule = LRRangeTest(0.01, size, rate, staircase, last)
        _assert_rates(schedule, last, lambda i, case=(size, rate, staircase): wanted(i, *case))


@pytest.mark.parametrize(
    "schedule",
    [
        WarmupLR(0.0, 0.1, 10**6),
        WarmupDecayLR(10**7, warmup_num_steps=10**6),
        WarmupCosineLR(10**7, warmup_num_steps=10**6, lr=1.0),
        LRRangeTest(),
    ],
)
def test_schedules_are_float32_scalars_far_into_a_run(schedule: LRSchedule) -> None:
    for count in (0, 10**5, 10**6 + 1, 2 * 10**7):
        eager, traced = schedule(count), jax.jit(schedule)(count)
        assert eager.shape == traced.shape == ()
        assert eager.dtype == traced.dtype == jnp.float32
        assert not eager.weak_type
        assert float(eager) == pytest.approx(float(traced), rel=1e-6)
    assert hash(schedule) == hash(type(schedule)(**vars(schedule)))


def test_an_integer_may_be_written_as_a_float() -> None:
    assert WarmupDecayLR(1e3).total_num_steps == 1000
