"""`OverflowWatch`: reports overflow at the smallest loss scale without waiting for the devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import PipelineError
from jaxpipe.optim import LossScaler
from jaxpipe.state import TrainState


class OverflowWatch:
    """Checks the loss scale of past steps.

    A step whose result has arrived is checked before the next step. A running step is waited for
    only if a second step has been started after it. So the error is raised at most one step late,
    and the devices never wait for the host. Without a dynamic `scaler` there is nothing to check.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.enabled and scaler.dynamic else None
        self._pending: list[Any] = []
        self._is_exhausted = False

    def note(self, state: TrainState) -> None:
        """Copy the flag from the state after a step, because the next step may donate the state."""
        if self._scaler is not None:
            loss_scale: Any = state.loss_scale
            self._pending.append(jnp.copy(loss_scale.exhausted))

    def check(self) -> None:
        """Check the steps whose results have arrived.

        Raises PipelineError if gradients overflowed at the smallest loss scale.
        """
        is_alone = jax.process_count() == 1  # otherwise processes could decide differently
        while self._pending and (
            len(self._pending) > 1 or (is_alone and self._pending[0].is_ready())
        ):
            # Blocks until the step has ended.
            self._is_exhausted |= bool(jax.device_get(self._pending.pop(0)))
        if self._is_exhausted and self._scaler is not None:
            raise PipelineError(
                "gradients must be finite at the smallest loss scale, but got an overflow at "
                f"fp16.min_loss_scale={self._scaler.min_scale:g}, below which it cannot fall. Look "
                "for values that are not finite in the batches, lower the learning rate, or use "
                "bf16 instead of fp16."
            )
