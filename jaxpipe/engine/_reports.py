"""What an engine tells of its training: rates, norms, scales and losses."""

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.config import TrainConfig
from jaxpipe.errors import PipelineError
from jaxpipe.optim import LossScaler, next_hyperparams
from jaxpipe.pipeline import ChosenOptimizer, Hyperparams
from jaxpipe.state import TrainState

from ._hold import hold_signals
from ._source import Batch
from ._turn import Turn, one_thread

_RATE = "learning_rate"


class TrainingReports(ABC):
    """Base of `PipelineEngine` that reads and sets what belongs to the optimiser.

    Nothing is fetched from the devices before it is asked for.

    Args:
        chosen: The optimiser.
        scaler: What scales the loss, if anything does.
        config: The configuration; its sections `optimizer` and `scheduler` count.

    Attributes:
        optimizer: The optax transformation in use; None: the engine only evaluates.
        lr_scheduler: The schedule in use, where one was given apart from the optimiser.
    """

    _turn: Turn

    def __init__(self, chosen: ChosenOptimizer, scaler: LossScaler | None, config: TrainConfig) -> None:
        self.optimizer: optax.GradientTransformation | None = chosen.transformation
        self.lr_scheduler: optax.Schedule | None = chosen.lr_scheduler
        self._schedules = chosen.schedules
        self._scaler = LossScaler.none() if scaler is None else scaler
        self._written = {
            np.float32(x): x for x in _numbers([s.params for s in (config.optimizer, config.scheduler) if s])
        }
        """By the value that the optimiser's state has in float32, a number as the user wrote it."""
        self._state: TrainState | None = None
        self._metrics: dict[str, Any] = {}
        self._clock: _Clock | None = None
        self._num_tokens: int | None = 0
        """Tokens trained so far; None: a batch held something else."""

    @property
    @abstractmethod
    def state(self) -> TrainState:
        """The present state."""

    @abstractmethod
    def _hyperparams(self) -> Hyperparams:
        """Access to the optimiser's state, with no program in flight on simulated devices."""

    @property
    def metrics(self) -> dict[str, Any]:
        """What the last trained batch gave: `loss`, `grad_norm` and the rest of `Pipeline.step`'s metrics.

        Arrays on the devices, computed while the caller goes on; empty before the first batch.
        """
        return dict(self._metrics)

    @one_thread
    def get_lr(self) -> list[float]:
        """The learning rate of the next update, in a list as DeepSpeed's groups have it.

        The optimiser computes with it in float32. A number of the configuration, or one that was set, is given as it
        was written there, any other as the shortest that is the same in float32.

        For Muon the second is that of the parameters which Adam updates. A schedule built into a finished optax
        optimiser is not known here: its rate is that of the last update.

        Raises:
            PipelineError: The optimiser does not keep it in its state, or there is no optimiser.
        """
        values = self._next_hyperparams()
        others = [value for name, value in values.items() if name.endswith(f"_{_RATE}")]
        if _RATE not in values:
            raise self._not_kept("learning rate", "get_lr", values)
        return [values[_RATE], *others]

    @one_thread
    def get_mom(self) -> list[float | tuple[float, float]]:
        """The momentum of the next update, in a list as DeepSpeed's groups have it, as numbers as in `get_lr`.

        `momentum`, or `(b1, b2)`, or `b1` alone where the state does not keep `b2`; for Muon both.

        Raises:
            PipelineError: The optimiser keeps none in its state, or there is no optimiser.
        """
        values = self._next_hyperparams()
        found: list[float | tuple[float, float]] = [values["momentum"]] if "momentum" in values else []
        if "b1" in values:
            found.append((values["b1"], values["b2"]) if "b2" in values else values["b1"])
        if not found:
            raise self._not_kept("momentum", "get_mom", values)
        return found

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for all updates from now on.

        Args:
            lr: The rate, at least 0.

        Raises:
            ConfigError: As `set_hyperparams` raises it.
            PipelineError: No shapes are known yet.
        """
        self.set_hyperparams(learning_rate=lr)

    @one_thread
    def set_hyperparams(self, **values: float) -> None:
        """Set hyperparameters that the optimiser keeps in its state, for all updates from now on.

        Those of the configuration's optimisers are kept there, and those of `optax.inject_hyperparams`.

        Args:
            **values: Name to number, such as `learning_rate=1e-4`.

        Raises:
            ConfigError: The optimiser keeps none of that name, it follows a schedule, or a value is no finite number or
                out of the range that the configuration would accept.
            PipelineError: No shapes are known yet.
        """
        state, access = self.state, self._hyperparams()
        with hold_signals():
            opt_state = access.write(state.opt_state, values)
            self._state = dataclasses.replace(state, opt_state=opt_state)
            self._written |= {np.float32(x): x for x in _numbers(values)}

    def get_global_grad_norm(self) -> jax.Array | None:
        """Norm of the last batch's gradient over all stages, before clipping; None before the first batch."""
        return self._metrics.get("grad_norm")

    def get_additional_losses(self) -> dict[str, jax.Array] | None:
        """Losses that layers reported in the last trained batch, by `layer/name`; None where none did."""
        return self._metrics.get("losses")

    @property
    @one_thread
    def skipped_steps(self) -> int:
        """Updates skipped because gradients overflowed."""
        return 0 if self._state is None else int(self._state.skipped_steps)

    def was_step_applied(self) -> bool:
        """Whether the last trained batch changed the parameters; false before the first."""
        return bool(self._metrics) and not bool(self._metrics.get("overflow", False))

    @property
    @one_thread
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with; 1 unless training is in float16."""
        if self._state is None or not self._scaler.enabled:
            return self._scaler.initial_scale
        scale: Any = self._state.loss_scale
        return float(scale.scale)

    def _next_hyperparams(self) -> Mapping[str, float]:
        if self.optimizer is None:
            return {}
        if self._state is None:
            values = next_hyperparams(self.optimizer.init({}), self._schedules) or {}
        else:
            values = self._hyperparams().read(self._state.opt_state)
        return {name: self._as_written(x) if isinstance(x, float) else x for name, x in values.items()}

    def _as_written(self, value: float) -> float:
        held = np.float32(value)
        return self._written.get(held, float(np.format_float_scientific(held)))

    def _not_kept(self, what: str, call: str, values: Mapping[str, float]) -> PipelineError:
        kept = ", ".join(values) or ("no hyperparameters" if self.optimizer is not None else "no optimizer")
        return PipelineError(
            f"the {what} must lie in the optimizer's state for {call}, but got one with {kept}. Name the optimizer in "
            "the config, pass optimizer=optax.adamw with lr_scheduler, or build it with "
            "optax.inject_hyperparams(optax.adamw)(...)."
        )

    def _count_tokens(self, batch: Batch) -> None:
        """Add the tokens of what is trained, where all inputs are integers of one shape `[samples, length]`."""
        leaves = jax.tree.leaves(batch[0])
        shapes = {leaf.shape for leaf in leaves}
        is_text = len(shapes) == 1 and all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)
        if self._num_tokens is not None:
            num_tokens = math.prod(*shapes) if is_text and len(*shapes) == 3 else None
            self._num_tokens = None if num_tokens is None else self._num_tokens + num_tokens

    def _start_clock(self, num_samples: int) -> None:
        """Begin to measure speed, unless that has begun; the first batch compiles and does not count."""
        if self._clock is None:
            self._clock = _Clock(num_samples, self._num_tokens, time.perf_counter())

    def _step_line(self, step: int, num_samples: int) -> str:
        """A line on the last batch and the speed since the last line; waits for it."""
        shown = self._metrics
        parts = [f"step {step}", f"loss {float(shown['loss']):.4f}"]
        rates = self._next_hyperparams()
        parts += [f"lr {rates[_RATE]:.3e}"] if _RATE in rates else []
        parts.append(f"grad norm {float(shown['grad_norm']):.4f}")
        parts += [f"loss scale {float(shown['loss_scale']):g}"] if self._scaler.enabled else []
        now, since = _Clock(num_samples, self._num_tokens, time.perf_counter()), self._clock
        if since is not None and num_samples > since.num_samples:
            elapsed_s = now.at_s - since.at_s
            parts.append(f"{(num_samples - since.num_samples) / elapsed_s:.1f} samples/s")
            if now.num_tokens and since.num_tokens is not None:
                parts.append(f"{(now.num_tokens - since.num_tokens) / elapsed_s:,.0f} tokens/s")
        self._clock = now
        return ", ".join(parts)


@dataclass(frozen=True)
class _Clock:
    """What had been trained at a moment."""

    num_samples: int
    num_tokens: int | None
    at_s: float


def _numbers(value: Any) -> Iterator[float]:
    """All Python numbers in dictionaries and lists that float32 has."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        limits = np.finfo(np.float32)
        if value == 0 or limits.tiny <= abs(value) <= limits.max:
            yield float(value)
