"""1F1B on combined ticks with the chunks folded: S microbatches in flight."""

from ._fold import FoldedTimetable
from ._timetable import Action


class OneFOneBVSchedule(FoldedTimetable):
    """1F1B with two chunks a stage, the first going down the stages, the second up again.

    `"1f1b-v"`.

    The model is cut into `2S` parts; stage s holds parts `s` and `2S - 1 - s`. Part p runs the
    forward of microbatch m at step `2m + p` and its backward at step `2m + 4S - 2 - p`: `2M + 4S -
    3` steps, of which the first `2S - 1` hold forwards only, the next `2M - 1` both, the last `2S -
    1` backwards only. The two chunks of a stage never want the same step, and what the last stage
    hands from its first chunk to its second needs no exchange. The input and the loss are both on
    stage 0.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`, as `"1f1b"`.
    - In flight on stage s: `min(2S, M + min(M, s + 1))` microbatches counted on each chunk, so the
      activations of at most S whole stages, where `"1f1b"` holds up to `2S - 1`.
    - Use it where the activations of `"1f1b"` do not fit, before paying for recomputing them. Steps
      are half as long and twice as many.

    Reference:
        Qi et al. (2024), "Pipeline Parallelism with Controllable Memory", the V-shaped placement;
        its order on combined ticks.
    """

    def num_steps(self) -> int:
        """`2M + 4S - 3`."""
        return 2 * self.micro_batches + 4 * self.stages - 3

    def forward_at(self, step: int) -> Action:
        """Part p, `s` or `2S - 1 - s`, and microbatch m with `2m + p = step`."""
        return self.downwards(step)

    def backward_at(self, step: int) -> Action:
        """Part p, `s` or `2S - 1 - s`, and microbatch m with `2m + 4S - 2 - p = step`."""
        return self.upwards(step)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`(M + S - 1)(F + B)`."""
        return (self.micro_batches + self.stages - 1) * (forward_s + backward_s)
