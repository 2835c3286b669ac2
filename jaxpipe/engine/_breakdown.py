"""`Breakdown`: the output of `wall_clock_breakdown`, `memory_breakdown` and `flops_profiler`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxpipe._util.files import write_file
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import TrainState
from jaxpipe.data import Batch

from ._compile import Reporter
from ._layer_profiles import format_profile, layer_profiles, memory_line
from ._phase_times import phase_times
from ._recorded import Operation
from ._trainer import Trainer

_EVERY = 10
"""Number of steps between two timing lines if `steps_per_print` is None.

This is DeepSpeed's default for `steps_per_print`.
"""


class Breakdown:
    """Measures steps and shows their cost, as the configuration requests."""

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        self._trainer = trainer
        self._section = config.flops_profiler
        self._every = (config.steps_per_print or _EVERY) if config.wall_clock_breakdown else 0
        self._shows_memory = config.memory_breakdown
        self.is_on = bool(self._every) or self._shows_memory or self._section.enabled
        self._recorded: Sequence[Operation] = ()
        self._totals: dict[str, float] = {}
        self._since = 0
        self._at_s = 0.0
        self._mark_s = 0.0

    def begin(self) -> Callable[[Sequence[Operation]], None] | None:
        """Begin a step. If it is to be recorded, return the function that takes its operations."""
        self._mark_s = time.perf_counter()
        step = self._trainer.global_steps + 1
        profiles = self._section.enabled and step == self._section.profile_step
        return self._take if profiles or self._is_due(step) else None

    def note(self, what: str) -> None:
        """Record the end of a phase of the host's work, begun by the step or the last phase."""
        now = time.perf_counter()
        self._totals[what] = self._totals.get(what, 0.0) + now - self._mark_s
        self._mark_s = now

    def add(self, what: str, elapsed_s: float) -> None:
        """Add time spent outside steps."""
        self._totals[what] = self._totals.get(what, 0.0) + elapsed_s

    def show(
        self, pipeline: Pipeline, arguments: tuple[TrainState, Batch] | None
    ) -> Mapping[str, float]:
        """Show the output due after a step, and return the seconds of its phases by name."""
        # Empty if the step was not recorded.
        phases = phase_times(self._recorded)
        step = self._trainer.global_steps
        report = self._trainer.compiler.report
        # There are no `arguments` if the step ran as several calls.
        if self._shows_memory and arguments is not None:
            self._shows_memory = False
            report(memory_line(pipeline, pipeline.step.lower(*arguments).compile()))
        if self._section.enabled and step == self._section.profile_step:
            self._show_profile(pipeline, report, phases.get("step"))
        if self._is_due(step):
            report(self._line(step, phases))
        elif not self._at_s:
            # The first step includes compilation, so it does not count.
            self._totals = {}
            self._since = step
            self._at_s = time.perf_counter()
        self._recorded = ()
        return phases

    def _is_due(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def _take(self, operations: Sequence[Operation]) -> None:
        self._recorded = operations

    def _show_profile(self, pipeline: Pipeline, report: Reporter, step_s: float | None) -> None:
        layers = layer_profiles(pipeline, self._recorded, stage_devices(pipeline.mesh.devices))
        text = format_profile(pipeline, layers, self._section, self._trainer.global_steps, step_s)
        if self._section.output_file is None:
            report(text)
        elif jax.process_index() == 0:
            write_file(self._section.output_file, text + "\n")

    def _line(self, step: int, phases: Mapping[str, float]) -> str:
        now = time.perf_counter()
        count = step - self._since
        began_s = self._at_s
        parts = [f"{what} {1e3 * total / count:.4g} ms" for what, total in self._totals.items()]
        if began_s:
            parts.append(f"step {1e3 * (now - began_s) / count:.4g} ms")
        self._totals = {}
        self._since = step
        self._at_s = now
        line = f"time of a step, the mean of {count} up to step {step}: {', '.join(parts)}"
        shown = ", ".join(
            f"{name} {1e3 * seconds:.4g} ms" for name, seconds in phases.items() if name != "step"
        )
        if shown:
            line += f"; a device in step {step}: {shown}"
        return line


def stage_devices(devices: Any) -> dict[int, int]:
    """Return one local device number for each stage here; `devices` is `[num_stages, ...]`."""
    own = {
        stage: [device for device in row.flat if device.process_index == jax.process_index()]
        for stage, row in enumerate(devices)
    }
    return {stage: each[0].local_hardware_id for stage, each in own.items() if each}
