"""Zero-bubble with the shortest warm-up.

Split backwards, S microbatches in flight on one chunk a stage.
"""

from ._filled import FilledTimetable
from ._timetable import Action


class ZeroBubbleH1Schedule(FilledTimetable):
    """ZB-H1: the order of `TrainSchedule` with the backward split into I and W: `"zero-bubble-h1"`.

    Stage s runs the forward of microbatch m at step `2m + s` and its input gradient at step `2(S +
    m) - s - 1`. Weight gradients go where they cost least (`fill_weights`): into the steps in which
    a stage drains and has nothing else, and on all stages together, one for two of the other steps.

    - Makespan: `M(F + B) + (S - 1)(F + I - W) + (M - 1) abs(F - I)` for `W <= min(F, I)` and `M >=
      S > 1`. As a step holds forwards on some stages and input gradients on others, it costs the
      longer: where these differ, as with recompute, `"zero-bubble"` is faster.
    - In flight on every stage: `min(M, S)` microbatches, a residual being kept until its weight
      gradient, where `"zero-bubble"` holds up to `2S - 1`.
    - Pending, from I to W: `s + 1` on stage s, at most `min(M, S)`, where `"zero-bubble"` has up to
      `2S - 2`. Each one less that `max_pending` allows costs up to W.
    - Use it where the bubble matters and neither the activations of `"zero-bubble"` fit nor two
      chunks a stage, which `"zero-bubble-v"` needs for half the bubble.

    Reference:
        Qi et al. (2023), "Zero Bubble Pipeline Parallelism", ZB-H1, re-timed so that stages keep
        step.
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
        input_s, work_s = backward_s - weight_s, self.micro_batches * (forward_s + backward_s)
        if self.micro_batches < self.stages:
            return None
        if self.stages == 1:
            return work_s
        mixed_s = (self.micro_batches - 1) * abs(forward_s - input_s)
        return work_s + (self.stages - 1) * (forward_s + input_s - weight_s) + mixed_s

    def _turn(self, since: int) -> Action:
        return 0, -1 if since % 2 else since // 2
