"""Zero-bubble with the shortest warm-up.

Split backwards, S microbatches in flight, one chunk per stage.
"""

from ._filled import FilledTimetable
from ._timetable import Action


class ZeroBubbleH1Schedule(FilledTimetable):
    """ZB-H1: the order of `TrainSchedule` with the backward split into I and W: `"zero-bubble-h1"`.

    Stage s runs the forward of microbatch m at step `2m + s` and its input gradient at step `2(S +
    m) - s - 1`. Weight gradients run where they cost least (`fill_weights`): in the steps in which
    a stage drains and has nothing else to do, and otherwise on all stages together, in every second
    step.

    - Makespan: `M(F + B) + (S - 1)(F + I - W) + (M - 1) abs(F - I)` for `W <= min(F, I)` and `M >=
      S > 1`. Some stages run a forward in a step while others run an input gradient, so the step
      takes as long as the slower of the two. If F and I differ, as with recompute, `"zero-bubble"`
      is faster.
    - In flight on every stage: `min(M, S)` microbatches, compared with up to `2S - 1` for
      `"zero-bubble"`. Residuals are kept until their weight gradient has run.
    - Pending, from I to W: `s + 1` on stage s, at most `min(M, S)`, compared with up to `2S - 2`
      for `"zero-bubble"`. Each pending weight gradient less that `max_pending` allows costs up to
      W.
    - Use it if the bubble matters, the activations of `"zero-bubble"` do not fit, and you cannot
      have the two chunks per stage with which `"zero-bubble-v"` halves the bubble.

    Reference:
        Qi et al. (2023), "Zero Bubble Pipeline Parallelism": ZB-H1, re-timed so that the stages run
        in lockstep.
    """

    def num_unfilled_steps(self) -> int:
        """`2(M + S - 1)`."""
        return 2 * (self.micro_batches + self.stages - 1)

    def forward_at(self, step: int) -> Action:
        """Microbatch m with `2m + s = step`."""
        return self._turn(step - self.stage_id)

    def backward_at(self, step: int) -> Action:
        """Microbatch m with `2(S + m) - s - 1 = step`."""
        return self._turn(step - (2 * self.stages - self.stage_id - 1))

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """`M(F + B) + (S - 1)(F + I - W) + (M - 1) abs(F - I)`; None if `M < S`."""
        input_s = backward_s - weight_s
        work_s = self.micro_batches * (forward_s + backward_s)
        if self.micro_batches < self.stages:
            return None
        if self.stages == 1:
            return work_s
        mixed_s = (self.micro_batches - 1) * abs(forward_s - input_s)
        return work_s + (self.stages - 1) * (forward_s + input_s - weight_s) + mixed_s

    def _turn(self, since: int) -> Action:
        return 0, -1 if since % 2 else since // 2
