"""1F1B on combined ticks with folded chunks and split backwards.

S microbatches in flight for any F and I.
"""

from typing import ClassVar

from ._filled import FilledTimetable
from ._fold import FoldedTimetable
from ._timetable import Action


class DualPipeVSchedule(FilledTimetable, FoldedTimetable):
    """DualPipeV: `"1f1b-v"` with the backward split into I and W: `"dual-pipe-v"`.

    Forwards and input gradients run as in `"1f1b-v"`: virtual stage p runs the forward of
    microbatch m at step `2m + p` and its input gradient at step `2m + 4S - 2 - p`. A step in which
    a stage runs both costs their sum, whatever each of them costs. Weight gradients follow within a
    few steps, where they cost least (`fill_weights`).

    - Makespan: `M(F + B) + (S - 1)(F + I)` for `M >= S`, which is `(S - 1)W` less than `"1f1b-v"`,
      whatever F, I and W cost. If F = I, `"zero-bubble-v"` is faster with as many microbatches in
      flight. If I is longer than F, as with recompute, this schedule is faster for many
      microbatches.
    - In flight on stage s: at most `2S` microbatches, counted on each chunk, which is S whole
      stages.
    - Pending, from I to W: one, counted on each chunk. A `max_pending` K above 1 hides more weight
      gradients: K = S hides `(S - 1)W`. It keeps up to K - 1 more microbatches in flight, counted
      on each chunk.
    - Use it if `"zero-bubble"` does not fit and recompute makes I longer than F.

    Reference:
        DeepSeek-AI (2025), DualPipe, and Qi et al. (2025), "DualPipe could be better without the
        Dual", which folds it. Here it is re-timed so that the stages run in lockstep, and by
        default keeps only as many weight gradients pending as need no additional memory.
    """

    max_pending: ClassVar[int | None] = 1

    def num_unfilled_steps(self) -> int:
        """`2M + 4S - 3`."""
        return 2 * self.micro_batches + 4 * self.stages - 3

    def forward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and microbatch m with `2m + p = step`."""
        return self.downwards(step)

    def backward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and microbatch m with `2m + 4S - 2 - p = step`."""
        return self.upwards(step)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """`M(F + B) + (S - 1)(F + I)`; None for fewer than S microbatches."""
        if self.micro_batches < self.stages:
            return None
        tick_s = forward_s + backward_s
        return self.micro_batches * tick_s + (self.stages - 1) * (tick_s - weight_s)
