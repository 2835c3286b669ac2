from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.optim import OneCycle

NUM_UPDATES = 40
LOW, HIGH, LOW_MOM, HIGH_MOM = 0.01, 0.2, 0.8, 0.95


def _height(batches: int, first: int, second: int, stairs: tuple[int, int]) -> float:
    """Height in the cycle after some batches, by walking through them."""
    place, going_up = 0, True
    for _ in range(batches):
        place += 1
        if going_up and place > first:
            place, going_up = 1, False
        if not going_up and place == second:
            place, going_up = 0, True
    size, count = (first, stairs[0]) if going_up else (second, stairs[1])
    left = place if going_up else second - place
    return (left * count // size) / count if count else left / size


def _expected(
    first: int, second: int, stairs: tuple[int, int], decay: tuple[int, float, float], last: int
) -> tuple[list[float], list[float]]:
    rates, momenta, (step, lr_rate, mom_rate) = [], [], decay
    for iteration in range(last, last + NUM_UPDATES):
        if iteration < first + second:
            height = _height(iteration + 1, first, second, stairs)
            rates.append(LOW + (HIGH - LOW) * height)
            momenta.append(HIGH_MOM - (HIGH_MOM - LOW_MOM) * height)
        else:
            gone = (iteration - first - second + 1) / step if step else 0.0
            rates.append(LOW / (1 + lr_rate * gone))
            momenta.append(HIGH_MOM * (1 + mom_rate * gone))
    if last == -1:
        momenta[0] = LOW_MOM
    return rates, momenta


STAIRS = [(0, 0), (2, 3), (4, 0), (15, 15)]


@pytest.mark.parametrize("decay", [(0, 1.0, 1.0), (3, 0.5, 0.001), (1, 0.0, 0.0)])
def test_every_small_cycle(decay: tuple[int, float, float]) -> None:
    counts = np.arange(NUM_UPDATES, dtype=np.int32)
    for case in product([1, 2, 3, 10], [1, 2, 5, 9], STAIRS, [-1, 0, 6]):
        first, second, stairs, last = case
        schedule = OneCycle(
            LOW,
            HIGH,
            cycle_first_step_size=first,
            cycle_second_step_size=second,
            cycle_first_stair_count=stairs[0],
            cycle_second_stair_count=stairs[1],
            decay_step_size=decay[0],
            decay_lr_rate=decay[1],
            decay_mom_rate=decay[2],
            cycle_min_mom=LOW_MOM,
            cycle_max_mom=HIGH_MOM,
            last_batch_iteration=last,
        )
        rates, momenta = schedule(counts), schedule.momentum(counts)
        wanted = _expected(first, second, stairs, decay, last)
        np.testing.assert_allclose(rates, wanted[0], rtol=1e-5, err_msg=str(case))
        np.testing.assert_allclose(momenta, wanted[1], rtol=1e-5, err_msg=str(case))
        assert rates.dtype == momenta.dtype == jnp.float32


def test_one_cycle_by_hand() -> None:
    schedule = OneCycle(
        0.1,
        0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_step_size=1,
        decay_lr_rate=1,
    )
    rates = [round(float(schedule(count)), 5) for count in range(10)]
    assert rates == [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.05, 0.03333, 0.025]
    momenta = [round(float(schedule.momentum(count)), 5) for count in range(9)]
    assert momenta == [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9, 0.9]


def test_stairs_hold_the_rate() -> None:
    schedule = OneCycle(0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert [float(schedule(count)) for count in range(9)] == [0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0]


def test_the_second_half_may_be_empty() -> None:
    schedule = OneCycle(0.0, 1.0, cycle_first_step_size=2, cycle_second_step_size=0)
    assert [float(schedule(count)) for count in range(5)] == [0, 0.5, 0, 0, 0]
