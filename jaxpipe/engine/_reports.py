"""`Reports`: hyperparameters, metrics and counts of an engine's training."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.core.executor import Metrics
from jaxpipe.core.pipeline import Hyperparams, Pipeline
from jaxpipe.data import Batch
from jaxpipe.errors import PipelineError
from jaxpipe.optim import next_hyperparams

from ._hold import hold_signals
from ._layer_profiles import model_flops, peak_flops
from ._trainer import Trainer

RATE = "learning_rate"


class Reports:
    """Hyperparameters, metrics and counts of a training run, fetched from devices on request."""

    def __init__(self, trainer: Trainer, schedules: Mapping[str, optax.Schedule]) -> None:
        self._trainer = trainer
        self._schedules = schedules
        self._scaler = trainer.scaler
        sections = [
            section.params
            for section in (trainer.config.optimizer, trainer.config.scheduler)
            if section
        ]
        self._written = {np.float32(x): x for x in _numbers(sections)}
        """Numbers as the user wrote them, by their float32 values in the optimiser state."""
        self._access: Hyperparams | None = None
        self._flops: tuple[Pipeline, float] | None = None
        self.forget()

    def forget(self) -> None:
        """Forget the steps so far."""
        self.metrics: Metrics | None = None
        self.evaluation: dict[str, Any] | None = None
        self._num_tokens: int | None = 0
        """Tokens trained so far. None: a batch contained other data than tokens."""

    def learning_rates(self) -> list[float]:
        """See `Engine.get_lr`."""
        values = self.next_hyperparams()
        others = [value for name, value in values.items() if name.endswith(f"_{RATE}")]
        if RATE not in values:
            raise self._not_kept("learning rate", "get_lr", values)
        return [values[RATE], *others]

    def momenta(self) -> list[float | tuple[float, float]]:
        """See `Engine.get_mom`."""
        values = self.next_hyperparams()
        found: list[float | tuple[float, float]] = (
            [values["momentum"]] if "momentum" in values else []
        )
        if "b1" in values:
            found.append((values["b1"], values["b2"]) if "b2" in values else values["b1"])
        if not found:
            raise self._not_kept("momentum", "get_mom", values)
        return found

    def set_hyperparams(self, values: Mapping[str, float]) -> None:
        """See `Engine.set_hyperparams`."""
        state = self._trainer.state
        access = self._hyperparams()
        with hold_signals():  # the write donates the optimiser state
            self._trainer.state = dataclasses.replace(
                state, opt_state=access.write(state.opt_state, values)
            )
            self._written |= {np.float32(x): x for x in _numbers(values)}

    def loss_scale(self) -> float:
        """See `Engine.loss_scale`."""
        if self._scaler is None:
            return 1.0
        if not self._trainer.has_state:
            return self._scaler.initial_scale
        scale: Any = self._trainer.state.loss_scale
        return float(jax.device_get(scale.scale))

    def count_tokens(self, batch: Batch) -> None:
        """Count the batch's tokens if all inputs are integers of one shape `[samples, length]`."""
        leaves = jax.tree.leaves(batch.inputs)
        shapes = {leaf.shape for leaf in leaves}
        is_text = len(shapes) == 1 and all(
            jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves
        )
        if self._num_tokens is not None:
            num_tokens = math.prod(*shapes) if is_text and len(*shapes) == 3 else None
            self._num_tokens = None if num_tokens is None else self._num_tokens + num_tokens

    @property
    def num_tokens(self) -> int | None:
        """Tokens trained so far. None if a batch contained other data than tokens."""
        return self._num_tokens

    def start_rates(self) -> dict[str, jax.Array]:
        """Return the learning rates of the next update, computed asynchronously."""
        if self._trainer.optimizer is None:
            return {}
        # No need to block: this program has no collectives, so it cannot wait for another program.
        found = self._access_to_state().start_read(self._trainer.state.opt_state)
        rates = {name: value for name, value in found.items() if name.endswith(RATE)}
        # The name `lr` is DeepSpeed's.
        return {"lr" if name == RATE else name: value for name, value in rates.items()}

    def flops_per_sample(self) -> float:
        """Return the floating-point operations per sample, counted once for each batch shape."""
        pipeline = self._trainer.pipeline
        if self._flops is None or self._flops[0] is not pipeline:
            samples = (
                pipeline.batches.num_microbatches
                * pipeline.batches.microbatch_size
                * pipeline.batches.num_replicas
            )
            self._flops = pipeline, model_flops(pipeline) / samples
        return self._flops[1]

    def mfu(self, flops_per_s: float) -> float | None:
        """Return the fraction of a device's peak FLOPs, or None if the peak is not known."""
        peak = peak_flops(self._trainer.mesh.local_devices[0].device_kind)
        return flops_per_s / peak if peak else None

    def peak_memory_gb(self) -> float | None:
        """Return the largest peak memory of this process's devices. None: they do not report it."""
        stats = [device.memory_stats() for device in self._trainer.mesh.local_devices]
        return max((x["peak_bytes_in_use"] / 1e9 for x in stats if x), default=None)

    def _hyperparams(self) -> Hyperparams:
        """Return access to the optimiser state. Simulated devices first finish their program."""
        self._trainer.block_until_ready()
        return self._access_to_state()

    def _access_to_state(self) -> Hyperparams:
        if self._access is None:
            self._access = self._trainer.pipeline.states.hyperparams(self._schedules)
        return self._access

    def next_hyperparams(self) -> Mapping[str, float]:
        """Return the hyperparameters of the next update by name; empty without an optimiser."""
        optimizer = self._trainer.optimizer
        if optimizer is None:
            return {}
        if not self._trainer.has_state:
            values = next_hyperparams(optimizer.init({}), self._schedules) or {}
        else:
            values = self._hyperparams().read(self._trainer.state.opt_state)
        return {
            name: self._as_written(x) if isinstance(x, float) else x for name, x in values.items()
        }

    def _as_written(self, value: float) -> float:
        rounded = np.float32(value)
        return self._written.get(rounded, float(np.format_float_scientific(rounded)))

    def _not_kept(self, what: str, call: str, values: Mapping[str, float]) -> PipelineError:
        names = ", ".join(values) or (
            "no hyperparameters" if self._trainer.optimizer is not None else "no optimizer"
        )
        return PipelineError(
            f"the {what} must lie in the optimizer's state for {call}, but got one with {names}. "
            "Name the optimizer in the config, pass optimizer=optax.adamw with lr_scheduler, or "
            "build it with optax.inject_hyperparams(optax.adamw)(...)."
        )


def _numbers(value: Any) -> Iterator[float]:
    """Yield all Python numbers in dictionaries and lists that are in the range of float32."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        limits = np.finfo(np.float32)
        if value == 0 or limits.tiny <= abs(value) <= limits.max:
            yield float(value)
