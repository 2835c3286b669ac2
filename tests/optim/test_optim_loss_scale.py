from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep

from jaxpipe.optim import LossScaler, LossScaleState


@dataclass
class Section:
    enabled: bool = True
    loss_scale: Any = 0.0
    initial_scale_power: Any = 4
    loss_scale_window: Any = 3
    hysteresis: Any = 2
    consecutive_hysteresis: Any = False
    min_loss_scale: Any = 1.0


class Simulation:
    """The rules in plain Python: what a user of float16 is told the keys do."""

    def __init__(self, section: Section) -> None:
        self.section = section
        self.scale = 2.0**section.initial_scale_power
        self.patience = section.hysteresis
        self.good_in_a_row = 0
        self.seen_overflow = False
        self.updates = 0
        self.last_overflow = -1

    def step(self, overflow: bool) -> bool:
        """Whether the scale could move."""
        self.updates += 1
        if not overflow:
            self.good_in_a_row += 1
            if self.section.consecutive_hysteresis:
                self.patience = self.section.hysteresis
            since = self.good_in_a_row - 1
            if since >= 1 and since % self.section.loss_scale_window == 0:
                self.patience = self.section.hysteresis
                self.scale = self.scale * 2
            return True
        self.good_in_a_row = 0
        self.last_overflow = self.updates - 1
        if self.patience > 1:
            self.patience -= 1
            return True
        if self.scale == self.section.min_loss_scale:
            return False
        self.scale = max(self.scale / 2, self.section.min_loss_scale)
        return True


def _run(scaler: LossScaler, overflows: np.ndarray) -> LossScaleState:
    """States after each update of each pattern: shape `[num_patterns, num_updates]`."""

    def one(pattern: jax.Array) -> LossScaleState:
        def step(
            state: LossScaleState, overflow: jax.Array
        ) -> tuple[LossScaleState, LossScaleState]:
            state = scaler.update(state, overflow)
            return state, state

        return jax.lax.scan(step, scaler.init(), pattern)[1]

    return jax.device_get(jax.jit(jax.vmap(one))(overflows))


SECTIONS = [
    Section(
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=smallest,
    )
    for window, hysteresis, consecutive, smallest in product(
        [1, 2, 3], [1, 2, 3], [False, True], [1.0, 3.0, 8.0]
    )
]
# The first ones have all values of each.
MIXED = [SECTIONS[7 * i % len(SECTIONS)] for i in range(len(SECTIONS))]


@pytest.mark.parametrize("section", sweep(12, MIXED), ids=repr)
def test_every_pattern_of_overflows(section: Section) -> None:
    patterns = np.array(list(product([False, True], repeat=8)))
    states = _run(LossScaler.from_section(section), patterns)
    for row, pattern in enumerate(patterns):
        simulation = Simulation(section)
        for update, overflow in enumerate(pattern):
            moved = simulation.step(bool(overflow))
            assert bool(states.exhausted[row, update]) is not moved
            if not moved:
                assert states.exhausted[row, update:].all()
                break
            assert states.scale[row, update] == simulation.scale
            assert states.hysteresis[row, update] == simulation.patience
            assert states.last_overflow[row, update] == simulation.last_overflow
            assert states.iteration[row, update] == update + 1


def _scales(scaler: LossScaler, pattern: str) -> list[float]:
    return _run(scaler, np.array([[c == "x" for c in pattern]])).scale[0].tolist()


@pytest.mark.parametrize(
    ("changes", "pattern", "wanted"),
    [
        ({}, "xxx", [16, 8, 4]),
        ({"hysteresis": 1}, "xxx", [8, 4, 2]),
        ({"hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
        ({}, "x.x", [16, 16, 8]),
        ({"consecutive_hysteresis": True}, "x.x.xx", [16, 16, 16, 16, 16, 8]),
        ({}, "........", [16, 16, 16, 32, 32, 32, 64, 64]),
        ({}, "x.......", [16, 16, 16, 16, 32, 32, 32, 64]),
        ({}, "xx....x", [16, 8, 8, 8, 8, 16, 16]),
        ({}, "xx...xx", [16, 8, 8, 8, 8, 4, 2]),
        ({"loss_scale_window": 1}, "....", [16, 32, 64, 128]),
        ({"min_loss_scale": 6.0, "hysteresis": 1}, "xx", [8, 6]),
        ({"min_loss_scale": 4.0, "hysteresis": 1}, "xxxx", [8, 4, 4, 4]),
        ({"initial_scale_power": 0}, "x...", [1, 1, 1, 1]),
    ],
)
def test_traces_by_hand(changes: dict[str, Any], pattern: str, wanted: list[float]) -> None:
    assert _scales(LossScaler.from_section(replace(Section(), **changes)), pattern) == wanted


def test_an_overflow_at_the_smallest_scale_is_remembered() -> None:
    scaler = LossScaler.from_section(Section(initial_scale_power=1, hysteresis=1))
    states = _run(scaler, np.array([[True, False, True, False]]))
    assert states.scale[0].tolist() == [1, 1, 1, 1]
    assert states.exhausted[0].tolist() == [False, False, True, True]


def test_a_static_scale_stays_and_counts() -> None:
    states = _run(
        LossScaler.from_section(Section(loss_scale=128)),
        np.array([[True, True, False, False, False, False]]),
    )
    assert states.scale[0].tolist() == [128] * 6
    assert states.iteration[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert states.last_overflow[0].tolist() == [0, 1, 1, 1, 1, 1]
    assert not states.exhausted.any()


def test_without_float16_nothing_is_scaled() -> None:
    scaler = LossScaler.from_section(Section(enabled=False))
    assert scaler == LossScaler.none()
    assert not scaler.enabled
    state = scaler.init()
    assert float(state.scale) == 1
    assert scaler.update(state, jnp.array(True)) is state


def test_the_state_keeps_its_dtypes() -> None:
    for scaler in (LossScaler.from_section(Section()), LossScaler(8.0), LossScaler.none()):
        before = scaler.init()
        after = jax.eval_shape(scaler.update, before, jax.ShapeDtypeStruct((), jnp.bool_))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(
            lambda x: (x.shape, x.dtype), after
        )
        assert all(not leaf.weak_type for leaf in jax.tree.leaves(before))
