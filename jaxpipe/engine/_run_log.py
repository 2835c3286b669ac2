"""`RunLog`: the progress lines of a run."""

import dataclasses
import datetime
import time
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe._util.numbers import as_integer
from jaxpipe.checkpoint import library_versions
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.distributed.topology import mesh_shape

from ._reports import RATE, Reports
from ._trainer import Trainer

_AXES = {"stage": "stages", "data": "replicas"}
"""Names in a progress line for the devices along an axis."""


class RunLog:
    """Reports a run line by line: a heading, steps and their speed, evaluations and saves."""

    def __init__(self, trainer: Trainer, reports: Reports) -> None:
        self._trainer = trainer
        self._reports = reports
        self._clock: _Clock | None = None
        self._is_on = bool(trainer.config.steps_per_print)
        self.has_heading = not self._is_on

    def forget(self) -> None:
        """Forget the steps so far."""
        self._clock = None

    def start_clock(self) -> None:
        """Start measuring speed, unless the clock is already running."""
        # At the end of the first batch, which includes compilation and does not count.
        if self._clock is None:
            self._clock = self._now()

    def _leave_out(self, elapsed_s: float) -> None:
        """Exclude time spent outside steps from their speed."""
        if self._clock is not None:
            self._clock = dataclasses.replace(self._clock, at_s=self._clock.at_s + elapsed_s)

    def show_heading(self, pipeline: Pipeline) -> None:
        """Show the start time, versions, devices, schedule, parameters and batch sizes."""
        self.has_heading = True
        trainer = self._trainer
        sizes = self._trainer.sizes
        versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
        shape = mesh_shape(trainer.mesh)
        places = " x ".join(
            f"{length} {_AXES.get(axis, axis)}" for axis, length in shape.items() if length > 1
        )
        given: Any = pipeline.plan.config.pipeline.schedule
        schedule = getattr(given, "__name__", given)
        self._trainer.compiler.report(
            f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}, {versions}; "
            f"{trainer.mesh.size} x {trainer.mesh.devices.flat[0].device_kind}: "
            f"{places or 'one place'}, schedule {schedule}, layers cut at "
            f"{list(pipeline.plan.parts)}; "
            f"{pipeline.trace.total_params:,} parameters in {trainer.config.compute_dtype}; "
            f"{sizes.train_batch_size} samples a step, in {sizes.gradient_accumulation_steps} "
            f"microbatches of {sizes.train_micro_batch_size_per_gpu} a replica"
        )

    def _step_name(self) -> str:
        """The current step, with the total number if the configured scheduler has one."""
        total = self._num_steps
        return f"step {self._trainer.global_steps}" + ("" if total is None else f" of {total}")

    @property
    def _num_steps(self) -> int | None:
        """Number of steps in the whole run, from the section `scheduler`. None: not known."""
        section = self._trainer.config.scheduler
        return None if section is None else as_integer(section.params.get("total_num_steps"))

    def show_step(self) -> None:
        """Wait for the last batch, and show it with its speed. All processes must call it."""
        # Waits for the batch and fetches all its metrics in one call.
        metrics = jax.device_get(self._reports.metrics)
        assert metrics is not None, "a step has ended"
        parts = [self._step_name(), f"loss {float(metrics['loss']):.4f}"]
        rates = self._reports.next_hyperparams()
        parts += [f"lr {rates[RATE]:.3e}"] if RATE in rates else []
        parts.append(f"grad norm {float(metrics['grad_norm']):.4f}")
        parts += [f"loss scale {float(metrics['loss_scale']):g}"] if "loss_scale" in metrics else []
        # After the wait for the batch above; otherwise only the calls would be timed.
        now = self._now()
        since = self._clock
        parts += (
            [] if since is None or now.num_steps == since.num_steps else self._speed(since, now)
        )
        self._clock = now
        self._trainer.compiler.report(", ".join(parts))

    def _speed(self, since: "_Clock", now: "_Clock") -> list[str]:
        """Return the parts of a line about the speed between two moments and the time left."""
        elapsed_s = now.at_s - since.at_s
        num_steps = now.num_steps - since.num_steps
        step_s = elapsed_s / num_steps
        samples_per_s = (now.num_samples - since.num_samples) / elapsed_s
        parts = [f"{1e3 * step_s:.1f} ms a step", f"{samples_per_s:.1f} samples/s"]
        if now.num_tokens and since.num_tokens is not None:
            parts.append(f"{(now.num_tokens - since.num_tokens) / elapsed_s:,.0f} tokens/s")
        reached = samples_per_s * self._reports.flops_per_sample() / self._trainer.mesh.size
        mfu = self._reports.mfu(reached)
        memory_gb = self._reports.peak_memory_gb()
        total = self._num_steps
        parts += [] if mfu is None else [f"MFU {mfu:.1%}"]
        parts += [] if memory_gb is None else [f"{memory_gb:.1f} GB"]
        if total is not None and total > now.num_steps:
            left = datetime.timedelta(seconds=round(step_s * (total - now.num_steps)))
            parts.append(f"{left} left")
        return parts

    def show_evaluation(self, params: str | None, elapsed_s: float) -> None:
        """Show the last evaluation of a dataset with the parameters named `params`."""
        self._leave_out(elapsed_s)
        found = self._reports.evaluation
        assert found is not None, "something has been evaluated"
        what = "evaluation" if params is None else f"evaluation of {params!r}"
        parts = [f"{self._step_name()}, {what}: loss {found['loss']:.5g}"]
        parts += [f"{name} {value:.5g}" for name, value in found.get("metrics", {}).items()]
        parts += [f"{found['num_samples']:,} samples", f"{elapsed_s:.1f} s"]
        self._trainer.compiler.report(", ".join(parts))

    def show_save(self, path: Any, elapsed_s: float) -> None:
        """Show that a checkpoint has been saved, or that an asynchronous save has started."""
        self._leave_out(elapsed_s)
        how = "is being written to" if self._trainer.config.checkpoint.async_save else "saved to"
        if self._is_on:
            line = f"{self._step_name()}, {how} {path}, {elapsed_s:.1f} s"
            self._trainer.compiler.report(line)

    def _now(self) -> "_Clock":
        trainer = self._trainer
        return _Clock(
            trainer.global_steps,
            trainer.global_samples,
            self._reports.num_tokens,
            time.perf_counter(),
        )


@dataclass(frozen=True)
class _Clock:
    """Steps, samples and tokens trained up to a point in time."""

    num_steps: int
    num_samples: int
    num_tokens: int | None
    at_s: float
