"""The forecast of a candidate, and a table of several forecasts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpipe._util.text import format_table

from ._memory import DeviceMemory

GIVEN = "given"
"""The partition method of explicit boundaries."""


@dataclass(frozen=True)
class StageForecast:
    """One stage of a candidate.

    Attributes:
        parts: Boundaries `(first, end)` of the layers of each chunk.
        num_params: Parameters of the stage's layers.
        in_flight: The most microbatches in flight, counted on each chunk.
        forward_s: Seconds of the forward of one microbatch through all chunks.
        backward_s: Seconds of the whole backward of one microbatch.
    """

    parts: tuple[tuple[int, int], ...]
    num_params: int
    in_flight: int
    forward_s: float
    backward_s: float

    @property
    def tick_s(self) -> float:
        """Seconds of one microbatch, forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Forecast:
    """The forecast for one combination of schedule, number of chunks, cut and recompute.

    Attributes:
        schedule: Name of the schedule.
        num_chunks: Chunks per stage.
        max_pending: The most pending weight gradients. None: the schedule's own number.
        partition: Partition method, or `GIVEN` for explicit boundaries.
        boundaries: Boundaries of the virtual stages.
        recompute: Layers per recomputed group; 0 if nothing is recomputed.
        memory: Bytes on each device.
        fits: Whether the memory is within the usable memory.
        step_s: Seconds of a step.
        ticks_s: The part of `step_s` in ticks.
        outside_s: The part of `step_s` before and after the ticks: casts, reductions over replicas,
            the update.
        bubble: Share of `ticks_s` in which the busiest stage does no work for a microbatch.
        exposed_s: Seconds of exchanges between stages that no computation overlaps.
        num_ticks: Number of ticks.
        pending: The most weight gradients of chunks that a stage keeps pending.
        samples_per_s: Samples per second.
        tokens_per_s: Tokens per second; None if the inputs are not tokens.
        mfu: The model's operations (three forwards) divided by the peak of all devices. Attention
            counts only what its mask keeps.
        mfu_whole: The same, counting the full square of attention, as in most published figures.
        stages: The stages.
    """

    schedule: str
    num_chunks: int
    max_pending: int | None
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
    pending: int
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    mfu_whole: float
    stages: tuple[StageForecast, ...] = field(repr=False)

    @property
    def label(self) -> str:
        """The candidate's settings as text."""
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        again = f", groups of {self.recompute} recomputed" if self.recompute else ""
        cut = repr(self.partition) if self.partition != GIVEN else f"at {list(self.boundaries)}"
        return f"{self.name}{chunks}, cut {cut}{again}"

    @property
    def name(self) -> str:
        """The schedule, and the most pending weight gradients if they are limited."""
        pending = "" if self.max_pending is None else f", {self.max_pending} pending"
        return f"{self.schedule}{pending}"


_HEADS = (
    *(
        "",
        "schedule",
        "chunks",
        "cut",
        "recompute",
        "weights GB",
        "masters, moments",
        "sums",
        "in flight",
    ),
    *("temporary", "total GB", "step ms", "bubble", "exposed ms", "tokens/s"),
    *("MFU", "MFU whole"),
)


def candidate_rows(candidates: Sequence[Forecast]) -> list[list[str]]:
    """Return a table of candidates, headings first. If one fits, the first is marked as best."""
    rows = [list(_HEADS)]
    for number, one in enumerate(candidates):
        memory = one.memory
        sizes = (
            memory.weights,
            memory.masters,
            memory.gradient_sums,
            memory.residuals + memory.pending,
        )
        rows.append(
            [
                "too large" if not one.fits else "best" if number == 0 else "",
                one.name,
                str(one.num_chunks),
                one.partition,
                str(one.recompute),
                *(gigabytes(size) for size in (*sizes, memory.temporaries, memory.total)),
                milliseconds(one.step_s),
                f"{one.bubble:.1%}",
                milliseconds(one.exposed_s),
                "-" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}",
                f"{one.mfu:.3f}",
                f"{one.mfu_whole:.3f}",
            ]
        )
    return rows


def candidate_table(candidates: Sequence[Forecast]) -> list[str]:
    """Return the table of candidates as lines of text."""
    return format_table(candidate_rows(candidates), ">")


def gigabytes(num_bytes: float) -> str:
    """Format bytes as GB (10^9 bytes) with one decimal."""
    return f"{num_bytes / 1e9:.1f}"


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds, with two decimals below one second."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
