"""The result of a plan: candidates with their memory and their step, as data, as a table and as JSON."""

import dataclasses
import json
from dataclasses import dataclass, field
from os import PathLike

from jaxpipe._files import write_file
from jaxpipe._paths import local_path
from jaxpipe._text import format_table

from ._compile import CompiledStep
from ._hardware import Hardware
from ._html import body_of, page_of
from ._memory import DeviceMemory


@dataclass(frozen=True)
class StageForecast:
    """One stage in a candidate.

    Attributes:
        parts: Boundaries `(first, end)` of its chunks' layers.
        num_params: Parameters of its layers.
        in_flight: Microbatches whose residuals it holds at once, at most, counted on each chunk.
        forward_s: Seconds of its forward of one microbatch, all its chunks.
        backward_s: Seconds of its whole backward.
    """

    parts: tuple[tuple[int, int], ...]
    num_params: int
    in_flight: int
    forward_s: float
    backward_s: float

    @property
    def tick_s(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Forecast:
    """One schedule, number of chunks, cut and recompute, and what it would take.

    Attributes:
        schedule: Name of the schedule.
        num_chunks: Chunks of a stage.
        partition: Partition method, or `"given"` for boundaries.
        boundaries: Boundaries of the virtual stages.
        recompute: Layers of a recomputed group; 0: nothing is recomputed.
        memory: Bytes on each device.
        fits: Whether these are within the usable memory.
        step_s: Seconds of a step.
        ticks_s: Seconds of them in ticks.
        outside_s: Seconds of them before and after: casts, reductions over replicas, the update.
        bubble: Share of the ticks' time in which the busiest stage works for no microbatch.
        exposed_s: Seconds of exchanges between stages under which nothing runs.
        num_ticks: Ticks.
        samples_per_s: Samples a second.
        tokens_per_s: Tokens a second; None where inputs are no tokens.
        mfu: Model's operations (three forwards) over the peak of all devices.
        stages: The stages.
    """

    schedule: str
    num_chunks: int
    partition: str
    boundaries: tuple[int, ...]
    recompute: int
    memory: DeviceMemory
    fits: bool
    step_s: float
    ticks_s: float
    outside_s: float
    bubble: float
    exposed_s: float
    num_ticks: int
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    stages: tuple[StageForecast, ...] = field(repr=False)

    @property
    def label(self) -> str:
        """Its settings in words."""
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        again = f", groups of {self.recompute} recomputed" if self.recompute else ""
        return f"{self.schedule}{chunks}, cut {self.partition!r}{again}"


@dataclass(frozen=True)
class StepPlan:
    """Forecasts of a training job; `str` shows them as a table.

    Attributes:
        hardware: The devices.
        num_devices: How many.
        axes: Lengths of the mesh's axes.
        num_microbatches: Microbatches of a step.
        microbatch_size: Samples of a microbatch on one replica.
        num_params: Parameters of the model.
        candidates: All that were looked at: those that fit before the others, each kind by its step.
        best: The fastest that fits; None where nothing fits.
        advice: What does not fit, and the first change that makes it fit; empty where all fits.
        assumptions: What was assumed.
        measured_step_s: Seconds of a step of a run to compare with; None: there is none.
        compiled: The shown candidate's program, where that was asked for.
    """

    hardware: Hardware
    num_devices: int
    axes: dict[str, int]
    num_microbatches: int
    microbatch_size: int
    num_params: int
    candidates: tuple[Forecast, ...] = field(repr=False)
    best: Forecast | None
    advice: str
    assumptions: tuple[str, ...] = field(repr=False)
    measured_step_s: float | None = None
    compiled: CompiledStep | None = None

    @property
    def shown(self) -> Forecast:
        """The candidate that is shown stage by stage: the best, or the smallest where none fits."""
        return self.best or min(self.candidates, key=lambda one: one.memory.total)

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        hardware = self.hardware
        lines = [
            f"{self.num_params / 1e9:.3g} G parameters on {self.num_devices} x {hardware.name} ({axes}), "
            f"{self.num_microbatches} microbatches of {self.microbatch_size} samples a replica; "
            f"{hardware.usable_bytes / 1e9:.0f} of {hardware.memory_bytes / 1e9:.0f} GB usable on each device",
            "",
            *format_table([_HEADS, *(self._row(one) for one in self.candidates)], ">"),
        ]
        shown = self.shown
        lines += ["", f"stages of {shown.label}:", *format_table([_STAGE_HEADS, *_stage_rows(shown)], ">")]
        if self.advice:
            lines += ["", self.advice]
        if self.measured_step_s is not None:
            ratio = self.measured_step_s / shown.step_s
            lines += ["", f"measured step {_ms(self.measured_step_s)} ms, {ratio:.2f} times the forecast"]
        if self.compiled is not None:
            lines += ["", str(self.compiled)]
        return "\n".join([*lines, "", "Assumed, not measured:", *(f"- {each}" for each in self.assumptions)])

    def to_json(self) -> str:
        """All of it as JSON: bytes and seconds."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write one page that needs nothing else, with bars of memory and the schedule drawn to scale.

        Args:
            path: The file.
        """
        rows = [self._row(one) for one in self.candidates]
        stages = [_STAGE_HEADS, *_stage_rows(self.shown)]
        write_file(local_path(path, "path"), page_of(self, _HEADS, rows, stages))

    def _repr_html_(self) -> str:
        rows = [self._row(one) for one in self.candidates]
        stages = [_STAGE_HEADS, *_stage_rows(self.shown)]
        return body_of(self, _HEADS, rows, stages, str(self).partition("\n")[0], level=4)

    def _row(self, one: Forecast) -> list[str]:
        memory = one.memory
        sizes = (memory.weights, memory.masters, memory.gradient_sums, memory.residuals + memory.pending)
        tokens = "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}"
        return [
            "best" if one is self.best else "" if one.fits else "too large",
            one.schedule,
            str(one.num_chunks),
            one.partition,
            str(one.recompute),
            *(_gb(size) for size in (*sizes, memory.temporaries, memory.total)),
            _ms(one.step_s),
            f"{one.bubble:.1%}",
            _ms(one.exposed_s),
            tokens,
            f"{one.mfu:.3f}",
        ]


_HEADS = (
    *("", "schedule", "chunks", "cut", "recompute", "weights GB", "masters, moments", "sums", "in flight"),
    *("temporary", "total GB", "step ms", "bubble", "exposed ms", "tokens/s", "MFU"),
)
_STAGE_HEADS = ("stage", "layers", "parameters M", "in flight", "forward ms", "backward ms", "microbatch ms")


def _stage_rows(one: Forecast) -> list[list[str]]:
    return [
        [
            str(number),
            ", ".join(f"{first}-{end - 1}" for first, end in stage.parts),
            f"{stage.num_params / 1e6:,.1f}",
            str(stage.in_flight),
            *(_ms(x) for x in (stage.forward_s, stage.backward_s, stage.tick_s)),
        ]
        for number, stage in enumerate(one.stages)
    ]


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
