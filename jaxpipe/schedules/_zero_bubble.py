"""Zero-bubble: split backwards, with weight gradients where the pipeline would be idle."""

from typing import ClassVar

from ._filled import FilledTimetable
from ._ring import RingTimetable


class ZeroBubbleSchedule(FilledTimetable, RingTimetable):
    """Combined ticks with split backwards: `"zero-bubble"`.

    The backward B is an input gradient I and a weight gradient W. Forwards and input gradients run
    as in `"1f1b"`, or as in `"interleaved"` if `num_chunks` v is above 1. Other stages need only
    the input gradient, so each weight gradient runs where it costs least (`fill_weights`). In the
    steady steps, where all stages are busy, every stage runs one. In the cool-down, a stage runs
    one whenever it has nothing else to do. The remaining `S - 1` run in separate steps at the end.
    Each stage hides `S - 1` weight gradients in this way.

    - Makespan: `M(F + I + W) + (S - 1)(F + I - W)/v` for `W <= min(F, I)`, if S divides M, M is 2S
      or more or v is 1, and `v(M - S) >= S - 2` (fewer microbatches leave less to hide). A step in
      which some stages run I and W while others run F and I takes as long as the slower pair. If W
      - F or W - I is positive, it is therefore added `(S - 1)/v` times.
    - In flight: `(v - 1)g + 2S - 1` microbatches on stage 0, counted on each chunk, as without the
      split, and one less on every other stage. Residuals are kept until their weight gradient has
      run.
    - Pending, from I to W: up to `S - 1 + s` on stage s, and `2S - 2` (v = 1) or `2S - 1` (v > 1)
      on the last. `max_pending` K limits this number. Each pending weight gradient less costs up to
      `W/v`; with K = 1 almost nothing is gained.
    - For M between S and 2S and v above 1, and for M below S, the time is between this formula and
      that of `"interleaved"`.
    - Use it if the bubble matters and the pending weight gradients fit. With full recompute they
      are the main memory cost. Layers whose backward cannot be split gain nothing.

    Reference:
        Qi et al. (2023), "Zero Bubble Pipeline Parallelism": ZB-H1, re-timed so that the stages run
        in lockstep.
    """

    min_chunks: ClassVar[int | None] = 1

    def num_unfilled_steps(self) -> int:
        """`R(M - 1) + 2V - 1`."""
        return RingTimetable.num_steps(self)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`M(F + B) + ((S - 1)(F + I) - hW)/v`, with `h` hidden weight gradients.

        `h = min(S - 1, v(M - S) + 1)`. The formula holds for `W <= min(F, I)` and a large enough
        `max_pending`.
        """
        chunks = self.num_chunks
        micro_batches = self.micro_batches
        stages = self.stages
        tick_s = forward_s + backward_s
        # Filling and draining take S - 1 ticks of F and I. Each stage runs h weight gradients while
        # it drains.
        hidden = min(stages - 1, max(0, chunks * (micro_batches - stages) + 1))
        bubble_s = (stages - 1) * (tick_s - weight_s) - hidden * weight_s
        # A step is never shorter than its work.
        return micro_batches * tick_s + max(0.0, bubble_s) / chunks
