"""`OverflowWatch`.

Errors where the loss scale can fall no further, without waiting for the devices.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import PipelineError
from jaxpipe.optim import LossScaler
from jaxpipe.state import TrainState


class OverflowWatch:
    """Looks at the loss scale of past steps.

    A step whose result has arrived is looked at before the next; one still under way is waited for
    only when a second one is under way behind it. So the error comes one step late at most, and the
    devices never wait for the host. Without a dynamic `scaler` there is nothing to look at.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.enabled and scaler.dynamic else None
        self._pending: list[Any] = []
        self._is_exhausted = False

    def note(self, state: TrainState) -> None:
        """Copy the flag of the state after a step, which the next step may donate."""
        if self._scaler is not None:
            loss_scale: Any = state.loss_scale
            self._pending.append(jnp.copy(loss_scale.exhausted))

    def check(self) -> None:
        """Look at the steps whose results have arrived.

        Raises PipelineError where gradients overflowed at the smallest loss scale.
        """
        is_alone = jax.process_count() == 1  # else processes could come to different ends
        while self._pending and (
            len(self._pending) > 1 or (is_alone and self._pending[0].is_ready())
        ):
            # Waits for the step, unless it has ended.
            self._is_exhausted |= bool(jax.device_get(self._pending.pop(0)))
        if self._is_exhausted and self._scaler is not None:
            raise PipelineError(
                "gradients must be finite at the smallest loss scale, but got an overflow at "
                f"fp16.min_loss_scale={self._scaler.min_scale:g}, below which it cannot fall. Look "
                "for values that are not finite in the batches, lower the learning rate, or use "
                "bf16 in place of fp16."
            )
