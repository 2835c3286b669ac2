"""Zero-bubble: split backwards, the weight gradients put where the pipeline would idle."""

from typing import ClassVar

from ._filled import FilledTimetable
from ._ring import RingTimetable


class ZeroBubbleSchedule(FilledTimetable, RingTimetable):
    """Combined ticks with the backward split: `"zero-bubble"`.

    The backward B is an input gradient I and a weight gradient W. Forwards and input gradients run
    as in `"1f1b"`, or as in `"interleaved"` with `num_chunks` v above 1. Only the input gradient is
    waited for by another stage, so the weight gradients go where they cost least (`fill_weights`):
    one on every stage in the steady steps, where all stages are busy; in the cool-down, one
    wherever a stage has nothing else to do; the rest, `S - 1` of them, in steps of their own at the
    end. Each stage so hides `S - 1` weight gradients.

    - Makespan: `M(F + I + W) + (S - 1)(F + I - W)/v` for `W <= min(F, I)`, if S divides M, M is 2S
      or more or v is 1, and `v(M - S) >= S - 2` (fewer microbatches leave less to hide). A step in
      which some stages run I and W while others run F and I costs the longer, so each of W - F and
      W - I, where above 0, counts `(S - 1)/v` times on top.
    - In flight on stage s: as the schedule without the split has on stage 0, `(v - 1)g + 2S - 1`
      microbatches counted on each chunk, one less on the other stages; a residual is kept until its
      weight gradient.
    - Pending, from I to W: up to `S - 1 + s` on stage s, and `2S - 2` (v = 1) or `2S - 1` (v > 1)
      on the last. `max_pending` K bounds it: each one less than these costs up to `W/v`, down to K
      = 1 and no gain.
    - For M between S and 2S and v above 1, and for M below S, time is between the formula and that
      of `"interleaved"`.
    - Use it where the bubble matters and the pending weight gradients fit. With full recompute
      these are the expensive memory. Layers whose backward cannot be split gain nothing.

    Reference:
        Qi et al. (2023), "Zero Bubble Pipeline Parallelism", ZB-H1, re-timed so that stages keep
        step.
    """

    min_chunks: ClassVar[int | None] = 1

    def num_unfilled_steps(self) -> int:
        """`R(M - 1) + 2V - 1`."""
        return RingTimetable.num_steps(self)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`M(F + B) + ((S - 1)(F + I) - hW)/v`, with `h` hidden weight gradients.

        `h = min(S - 1, v(M - S) + 1)`. It needs `W <= min(F, I)` and enough pending weight
        gradients.
        """
        chunks, micro_batches, stages = self.num_chunks, self.micro_batches, self.stages
        tick_s = forward_s + backward_s
        # Filling and draining take S - 1 ticks of F and I; h weight gradients of each stage run
        # while it drains.
        hidden = min(stages - 1, max(0, chunks * (micro_batches - stages) + 1))
        bubble_s = (stages - 1) * (tick_s - weight_s) - hidden * weight_s
        # No step is shorter than its work.
        return micro_batches * tick_s + max(0.0, bubble_s) / chunks
