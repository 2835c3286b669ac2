"""Costs from which a schedule is chosen, and the choice as a table."""

from dataclasses import dataclass, field

from jaxpipe._text import format_table


@dataclass(frozen=True)
class StageCosts:
    """Costs of one microbatch on the largest stage, cut into one chunk.

    Attributes:
        forward_s: Seconds of its forward.
        input_s: Seconds of the input gradient of its backward; with recompute, the second forward too.
        weight_s: Seconds of the weight gradient of its backward.
        backward_s: Seconds of its backward where it is not split. Default: `input_s + weight_s`.
        tick_overhead_s: Seconds that each tick takes beside its actions: exchanges that nothing hides, the loop.
        branch_overhead_s: Seconds that a branch around an action costs, where idle actions are skipped, and that each
            question whether to go on costs a loop that adds gradients to the sums of one of several chunks.
        copy_s: Seconds that a copy of a stage's weights takes, from one place in the device's memory to another.
        activation_bytes: Bytes of its residuals, from its forward to its backward.
        pending_bytes: Bytes that wait beside them from the input gradient to the weight gradient.
    """

    forward_s: float
    input_s: float
    weight_s: float
    backward_s: float | None = None
    tick_overhead_s: float = 0.0
    branch_overhead_s: float = 0.0
    copy_s: float = 0.0
    activation_bytes: float = 0.0
    pending_bytes: float = 0.0

    @property
    def whole_backward_s(self) -> float:
        """Seconds of a backward that is not split."""
        return self.input_s + self.weight_s if self.backward_s is None else self.backward_s

    @property
    def work_s(self) -> float:
        """Seconds of a forward and a backward that is not split."""
        return self.forward_s + self.whole_backward_s


@dataclass(frozen=True)
class Candidate:
    """A schedule, and what it would cost.

    Attributes:
        schedule: Its name.
        num_chunks: Chunks a stage.
        max_pending: The most pending weight gradients; None: the schedule's own number.
        skip_idle: Whether idle actions are branched around, instead of computed and dropped.
        step_s: Seconds of a step, without the update.
        num_ticks: Ticks of a step.
        in_flight: Microbatches whose activations a stage holds, in whole stages.
        pending: Weight gradients that a stage holds pending, in whole stages.
        memory_bytes: Bytes that both take on a device.
        fits: Whether that is within the limit.
    """

    schedule: str
    num_chunks: int
    max_pending: int | None
    skip_idle: bool
    step_s: float
    num_ticks: int
    in_flight: float
    pending: float
    memory_bytes: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, and what it was chosen from; `str` shows the table.

    Attributes:
        best: The chosen one.
        candidates: All that were looked at, simplest first.
        ideal_s: Seconds of a step without any bubble or overhead.
        memory_limit_bytes: The limit; None: none.
        reason: Why it was chosen.
    """

    best: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    ideal_s: float
    memory_limit_bytes: float | None
    reason: str

    def __str__(self) -> str:
        heads = ("schedule", "chunks", "pending", "idle actions", "step", "lost", "in flight", "memory", "")
        rows = [heads, *(self._row(one) for one in self.candidates)]
        return "\n".join([*format_table(rows, "<"), self.reason])

    def _row(self, one: Candidate) -> tuple[str, ...]:
        mark = "chosen" if one == self.best else "" if one.fits else "too large"
        return (
            one.schedule,
            str(one.num_chunks),
            f"{one.pending:g}" if one.pending else "-",
            "skipped" if one.skip_idle else "computed",
            f"{one.step_s * 1e3:.4g} ms",
            f"{1 - self.ideal_s / one.step_s:.1%}",
            f"{one.in_flight:g}",
            gigabytes(one.memory_bytes),
            mark,
        )


def gigabytes(num_bytes: float) -> str:
    """Write a number of bytes in GB of 10^9 bytes.

    Args:
        num_bytes: Bytes.

    Returns:
        Three digits or more, and the unit.
    """
    return f"{num_bytes / 1e9:.3g} GB"
