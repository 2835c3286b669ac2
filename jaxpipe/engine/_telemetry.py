"""`Telemetry`: sends an engine's metrics to its monitors."""

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.engine.monitor import Event, Monitor, MonitorLog, asks_for_monitors, open_monitors

from ._breakdown import Breakdown
from ._reports import Reports
from ._trainer import Trainer

_PREFIX = "Train/Samples/"
_EVALUATION = "Evaluation/Samples/"


class Telemetry:
    """Sends the metrics of each step to the monitors when the devices have computed them."""

    def __init__(
        self, trainer: Trainer, reports: Reports, breakdown: Breakdown, monitors: Sequence[Monitor]
    ) -> None:
        self._trainer = trainer
        self._reports = reports
        self._breakdown = breakdown
        config = trainer.config
        self._log = MonitorLog(monitors)
        self._speed = _Speed()
        # The same in all processes, because every process takes part in the programs that read the
        # state.
        self.is_on = bool(monitors) or asks_for_monitors(config)

    def open(self) -> None:
        """Open the monitors of the configuration."""
        if self.is_on and jax.process_index() == 0:
            for monitor in open_monitors(self._trainer.config):
                self._log.add(monitor)

    def add(self, monitor: Monitor) -> None:
        """See `Engine.add_monitor`."""
        self.is_on = True
        self._log.add(monitor)

    def flush(self) -> None:
        """See `Engine.flush_monitors`."""
        self._log.flush()

    def note_step(self) -> None:
        """Record a step that has been started. Called only if `is_on` is true."""
        arrays = self._arrays()
        samples = self._trainer.global_samples
        num_tokens = self._reports.num_tokens
        reports = self._reports
        speed = self._speed
        num_devices = self._trainer.mesh.size
        flops_per_sample = reports.flops_per_sample()

        def read() -> list[Event]:
            values = {name: _number(array) for name, array in arrays.items()}
            # After waiting for the values; otherwise only the calls would be timed.
            values |= speed.after(samples, num_tokens)
            if "samples_per_s" in values:
                reached = values["samples_per_s"] * flops_per_sample / num_devices
                values["tflops_per_device"] = reached / 1e12
                mfu = reports.mfu(reached)
                values |= {} if mfu is None else {"mfu": mfu}
            peak_gb = reports.peak_memory_gb()
            values |= {} if peak_gb is None else {"peak_memory_gb": peak_gb}
            return [Event(_PREFIX + name, value, samples) for name, value in values.items()]

        self._put(read)

    def note_evaluation(self, found: Mapping[str, Any]) -> None:
        """Record the evaluation of a dataset. Called only if `is_on` is true."""
        samples = self._trainer.global_samples
        values = {"loss": found["loss"], **found.get("metrics", {})}
        events = [Event(_EVALUATION + name, x, samples) for name, x in values.items()]
        self._put(lambda: events)

    @contextlib.contextmanager
    def timed(self, what: str) -> Generator[None]:
        """Record the duration of a call outside steps, and report progress if it takes long."""
        began = time.perf_counter()
        with self._trainer.compiler.waiting(what):
            yield
        elapsed_s = time.perf_counter() - began
        self._breakdown.add("checkpoint", elapsed_s)
        self.note_times({what: elapsed_s})

    def note_times(self, times: Mapping[str, float]) -> None:
        """Record the seconds that phases of a step, or calls outside steps, have taken."""
        if times:
            samples = self._trainer.global_samples
            events = [
                Event(f"{_PREFIX}elapsed_time_ms_{name}", 1e3 * x, samples)
                for name, x in times.items()
            ]
            self._put(lambda: events)

    def forget(self) -> None:
        """Forget the steps so far."""
        self._speed = _Speed()

    def _arrays(self) -> dict[str, jax.Array]:
        """Return the last step's scalars by name, or arrays whose elements are all equal."""
        trainer = self._trainer
        metrics = self._reports.metrics
        assert metrics is not None, "a step has been started"
        found = {"train_loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
        if "overflow" in metrics:
            # Copied, because the next step donates the state's buffers.
            found["skipped_steps"] = jnp.copy(trainer.state.skipped_steps)
        if "loss_scale" in metrics:
            found["loss_scale"] = metrics["loss_scale"]
        norms = metrics.get("grad_norms", {})
        found |= {f"grad_norms/{name}": value for name, value in norms.items()}
        found |= {f"losses/{name}": value for name, value in metrics.get("losses", {}).items()}
        found |= {f"metrics/{name}": value for name, value in metrics.get("metrics", {}).items()}
        return found | self._reports.start_rates()

    def _put(self, record: Callable[[], list[Event]]) -> None:
        if jax.process_index() == 0:
            self._log.put(record)


class _Speed:
    """Samples and tokens per second of a step. Used only by the thread that waits for steps."""

    def __init__(self) -> None:
        self._last: tuple[int, int | None, float] | None = None

    def after(self, num_samples: int, num_tokens: int | None) -> Mapping[str, float]:
        """Return a step's speed from the totals so far; empty for the first, which compiled."""
        now = time.perf_counter()
        last = self._last
        self._last = (num_samples, num_tokens, now)
        if last is None or now <= last[2]:
            return {}
        elapsed_s = now - last[2]
        speed = {"samples_per_s": (num_samples - last[0]) / elapsed_s}
        if num_tokens and last[1] is not None:
            speed["tokens_per_s"] = (num_tokens - last[1]) / elapsed_s
        return speed


def _number(array: jax.Array) -> float:
    """Return the scalar in this process's shard of an array."""
    return float(np.asarray(array.addressable_shards[0].data).reshape(-1)[0])
