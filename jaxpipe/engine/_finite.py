"""`FiniteWatch`: reports gradients that are not finite without waiting for the devices."""

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.exit import before_exit
from jaxpipe.config import TrainConfig
from jaxpipe.core.executor import Metrics
from jaxpipe.core.state import TrainState
from jaxpipe.errors import PipelineError
from jaxpipe.optim import LossScaler


class _Step(NamedTuple):
    """A step that has not been checked. The arrays are scalars on the devices."""

    number: int  # counted from 1
    is_bad: Any  # whether the step must end training
    loss: Any
    grad_norm: Any


class FiniteWatch:
    """Checks whether past steps must end training.

    A step must if its gradient norm is not finite and `nonfinite` is `"stop"`, or if it overflows
    at the smallest loss scale of a dynamic `scaler`. The device has not applied its update. A step
    whose result has arrived is checked before the next step. A running step is waited for only if a
    second step has been started after it. So the error is raised at most one step late, and the
    devices never wait for the host.
    """

    def __init__(self, config: TrainConfig, scaler: LossScaler | None) -> None:
        self._stops = config.on_nonfinite == "stop"
        self._scaler = scaler if scaler is not None and scaler.dynamic else None
        self._pending: list[_Step] = []
        if self._stops:
            before_exit(self._report_last, "checking its last steps")

    def forget(self) -> None:
        """Forget the steps so far."""
        self._pending = []

    def note(self, number: int, state: TrainState, metrics: Metrics) -> None:
        """Record a step that has been started, with its results."""
        if self._stops:
            assert "overflow" in metrics, "the norm is checked"
            is_bad: Any = metrics["overflow"]
        elif self._scaler is not None:
            loss_scale: Any = state.loss_scale
            # Copied, because the next step may donate the state.
            is_bad = jnp.copy(loss_scale.exhausted)
        else:
            return
        self._pending.append(_Step(number, is_bad, metrics["loss"], metrics["grad_norm"]))

    def check(self) -> None:
        """Check the steps whose results have arrived; may raise PipelineError. All must call it."""
        is_alone = jax.process_count() == 1  # otherwise processes could decide differently
        while self._pending and (
            len(self._pending) > 1 or (is_alone and self._pending[0].is_bad.is_ready())
        ):
            self._check_first()

    def check_all(self) -> None:
        """Wait for all steps, and check those after which training may continue from the state."""
        while self._stops and self._pending:
            self._check_first()

    def _check_first(self) -> None:
        step = self._pending[0]
        # Blocks until the step has ended.
        is_bad, loss, norm = jax.device_get((step.is_bad, step.loss, step.grad_norm))
        if not is_bad:
            del self._pending[0]
            return
        if self._stops:
            # Reported once: training may continue from the state, which has only finite updates.
            self.forget()
            raise PipelineError(
                f"the gradient of step {step.number} must be finite, but got "
                f"grad_norm={float(norm):g} with loss={float(loss):g}. Its update was not applied: "
                "the parameters are those of finite updates, and save_checkpoint saves them. Look "
                "for values that are not finite in the batch, or lower the learning rate. To "
                'continue after such steps set "nonfinite": "skip" in the config.'
            )
        assert self._scaler is not None
        raise PipelineError(
            "gradients must be finite at the smallest loss scale, but got an overflow at "
            f"fp16.min_loss_scale={self._scaler.min_scale:g}, below which it cannot fall. Look "
            "for values that are not finite in the batches, lower the learning rate, or use "
            "bf16 instead of fp16."
        )

    def _report_last(self) -> None:
        """At the end of the program: log the error of a step that no later call has reported."""
        # Steps that have not arrived are not waited for, because other processes may be gone.
        while self._pending and self._pending[0].is_bad.is_ready():
            try:
                self._check_first()
            except PipelineError as error:
                logging.getLogger("jaxpipe").error("%s", error)
