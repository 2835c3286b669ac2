"""The result of a plan.

The candidates with their memory and step time, as data, as tables and as JSON.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from os import PathLike

from jaxpipe._util.files import write_file
from jaxpipe._util.paths import local_path
from jaxpipe._util.text import format_table
from jaxpipe.core.planner import (
    Forecast,
    Hardware,
    candidate_rows,
    candidate_table,
    gigabytes,
    milliseconds,
)

from ._compile import CompiledStep
from ._html import ALTERNATIVE_SIDES, body_of, page_of


@dataclass(frozen=True)
class Alternative:
    """The same batch on the same devices with another setting.

    Attributes:
        change: The setting.
        forecast: The best candidate with this setting, or the smallest if none fits.
    """

    change: str
    forecast: Forecast


@dataclass(frozen=True)
class StepPlan:
    """Forecasts of a training job; `str` formats them as tables.

    Attributes:
        hardware: The type of device.
        num_devices: The number of devices.
        limit_bytes: Bytes that training may use on a device: the limit in the configuration, or the
            usable memory of the hardware without its communicators.
        axes: Lengths of the mesh's axes.
        num_microbatches: Microbatches per step.
        microbatch_size: Samples per microbatch on one replica.
        num_params: Parameters of the model.
        candidates: All candidates, the best first. The others are sorted by step time, those that
            fit before those that do not, and schedules that are a last resort after the others.
        best: The simplest candidate within 1 % of the shortest step that fits, a last resort only
            if no other fits; None if nothing fits.
        alternatives: The best candidate for each of several other settings, the cheapest change
            first. Empty if `plan` was called with `alternatives=False`.
        advice: Which candidates do not fit, and the first change that makes one fit. Empty if all
            fit.
        assumptions: The assumptions, as sentences.
        measured_step_s: Seconds of a measured step to compare with, or None.
        compiled: The compiled program of `shown`, or None if it was not compiled.
    """

    hardware: Hardware
    num_devices: int
    limit_bytes: float
    axes: dict[str, int]
    num_microbatches: int
    microbatch_size: int
    num_params: int
    candidates: tuple[Forecast, ...] = field(repr=False)
    best: Forecast | None
    alternatives: tuple[Alternative, ...] = field(repr=False)
    advice: str
    assumptions: tuple[str, ...] = field(repr=False)
    measured_step_s: float | None = None
    compiled: CompiledStep | None = None

    @property
    def shown(self) -> Forecast:
        """The candidate that is shown stage by stage: the best, or the smallest if none fits."""
        return self.candidates[0]

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        hardware = self.hardware
        lines = [
            f"{self.num_params / 1e9:.3g} G parameters on {self.num_devices} x {hardware.name} "
            f"({axes}), {self.num_microbatches} microbatches of {self.microbatch_size} samples a "
            f"replica; {self.limit_bytes / 1e9:.0f} of {hardware.memory_bytes / 1e9:.0f} GB "
            "usable on each device",
            "",
            *candidate_table(self.candidates),
        ]
        shown = self.shown
        lines += [
            "",
            f"stages of {shown.label}:",
            *format_table([_STAGE_HEADS, *_stage_rows(shown)], ">"),
        ]
        if self.alternatives:
            lines += ["", "the same batch with other settings, each at its best:"]
            lines += format_table(_alternative_rows(self), ALTERNATIVE_SIDES)
        if self.advice:
            lines += ["", self.advice]
        if self.measured_step_s is not None:
            ratio = self.measured_step_s / shown.step_s
            lines += [
                "",
                f"measured step {milliseconds(self.measured_step_s)} ms, {ratio:.2f} times the "
                "forecast",
            ]
        if self.compiled is not None:
            lines += ["", str(self.compiled)]
        return "\n".join(
            [*lines, "", "Assumed, not measured:", *(f"- {each}" for each in self.assumptions)]
        )

    def to_json(self) -> str:
        """Return the plan as JSON, in bytes and seconds."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained HTML page with bars of memory and the schedule drawn to scale.

        Args:
            path: The file to write.
        """
        heads, *rows = candidate_rows(self.candidates)
        stages = [_STAGE_HEADS, *_stage_rows(self.shown)]
        write_file(
            local_path(path, "path"), page_of(self, heads, rows, stages, _alternative_rows(self))
        )

    def _repr_html_(self) -> str:
        heads, *rows = candidate_rows(self.candidates)
        stages = [_STAGE_HEADS, *_stage_rows(self.shown)]
        title = str(self).partition("\n")[0]
        others = _alternative_rows(self)
        return body_of(self, heads, rows, stages, others, title, level=4)


_STAGE_HEADS = (
    "stage",
    "layers",
    "parameters M",
    "in flight",
    "forward ms",
    "backward ms",
    "microbatch ms",
)


_ALTERNATIVE_HEADS = ("", "setting", "candidate", "total GB", "step ms", "to the first row")


def _alternative_rows(plan: StepPlan) -> list[list[str]]:
    if not plan.alternatives:
        return []
    rows = [
        [
            "" if one.fits else "too large",
            each.change,
            one.label,
            gigabytes(one.memory.total),
            milliseconds(one.step_s),
            f"{one.step_s / plan.shown.step_s:.2f}",
        ]
        for each in plan.alternatives
        for one in (each.forecast,)
    ]
    return [list(_ALTERNATIVE_HEADS), *rows]


def _stage_rows(one: Forecast) -> list[list[str]]:
    return [
        [
            str(number),
            ", ".join(f"{first}-{end - 1}" for first, end in stage.parts),
            f"{stage.num_params / 1e6:,.1f}",
            str(stage.in_flight),
            *(milliseconds(x) for x in (stage.forward_s, stage.backward_s, stage.tick_s)),
        ]
        for number, stage in enumerate(one.stages)
    ]
