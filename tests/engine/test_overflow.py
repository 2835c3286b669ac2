"""Looking at the loss scale without waiting for the step under way."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxpipe.engine._overflow import OverflowWatch
from jaxpipe.errors import PipelineError
from jaxpipe.optim import LossScaler

DYNAMIC = LossScaler(4.0, dynamic=True, min_scale=2.0)


class Later:
    """A truth value that arrives when it is waited for, or told to."""

    def __init__(self, value: bool) -> None:
        self.value, self.has_arrived, self.num_waits = value, False, 0

    def is_ready(self) -> bool:
        return self.has_arrived

    def __bool__(self) -> bool:
        self.num_waits += not self.has_arrived
        self.has_arrived = True
        return self.value


def after_step(exhausted: Any) -> Any:
    return SimpleNamespace(loss_scale=SimpleNamespace(exhausted=exhausted))


def test_it_waits_for_all_but_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.engine._overflow.jnp.copy", lambda x: x)
    watch, steps = OverflowWatch(DYNAMIC), [Later(False), Later(True), Later(False)]
    for step in steps[:2]:
        watch.note(after_step(step))
        watch.check()
    assert [step.num_waits for step in steps] == [1, 0, 0]
    watch.note(after_step(steps[2]))
    for _ in range(2):
        with pytest.raises(
            PipelineError, match=r"overflow at fp16\.min_loss_scale=2, below which.*or use bf16"
        ):
            watch.check()
    assert [step.num_waits for step in steps] == [1, 1, 0]


def test_what_has_arrived_is_seen_at_once() -> None:
    watch = OverflowWatch(DYNAMIC)
    watch.check()
    arrived = jnp.bool_(True)
    watch.note(after_step(arrived.block_until_ready()))
    watch._pending[0].block_until_ready()
    with pytest.raises(
        PipelineError, match=r"min_loss_scale=2, below which it cannot fall\. Look for values"
    ):
        watch.check()


@pytest.mark.parametrize("scaler", [None, LossScaler.none(), LossScaler(8.0)])
def test_only_a_dynamic_scale_is_looked_at(scaler: LossScaler | None) -> None:
    watch = OverflowWatch(scaler)
    watch.note(after_step(jnp.bool_(True)))
    watch.check()
