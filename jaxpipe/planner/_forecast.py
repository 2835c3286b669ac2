"""The forecast of a candidate, and a table of several."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxpipe._text import format_table

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
        max_pending: The most pending weight gradients; None: the schedule's own number.
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
        pending: Weight gradients of chunks that a stage holds pending, at most.
        samples_per_s: Samples a second.
        tokens_per_s: Tokens a second; None where inputs are no tokens.
        mfu: Model's operations (three forwards) over the peak of all devices; of attention what its
            mask leaves.
        mfu_whole: The same with the whole square of attention, as most published figures count.
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
        """Its settings in words."""
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        again = f", groups of {self.recompute} recomputed" if self.recompute else ""
        return f"{self.schedule}{chunks}, cut {self.partition!r}{again}"


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
    """A table of candidates, heads first: the best, where one fits, is the first of them."""
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
                one.schedule
                if one.max_pending is None
                else f"{one.schedule}, {one.max_pending} pending",
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
    """The same as lines."""
    return format_table(candidate_rows(candidates), ">")


def gigabytes(num_bytes: float) -> str:
    """GB of 10^9 bytes, with one digit."""
    return f"{num_bytes / 1e9:.1f}"


def milliseconds(seconds: float) -> str:
    """Milliseconds, with two digits below a second."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"
