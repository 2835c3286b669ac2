"""1F1B on combined ticks with folded chunks: S microbatches in flight."""

from ._fold import FoldedTimetable
from ._timetable import Action


class OneFOneBVSchedule(FoldedTimetable):
    """1F1B with two chunks per stage in a V: first to last stage, then back: `"1f1b-v"`.

    The model is cut into `2S` virtual stages. Stage s holds virtual stages `s` and `2S - 1 - s`.
    Virtual stage p runs the forward of microbatch m at step `2m + p` and its backward at step `2m +
    4S - 2 - p`. That makes `2M + 4S - 3` steps: the first `2S - 1` have only forwards, the next `2M
    - 1` have both, and the last `2S - 1` have only backwards. The two chunks of a stage never need
    the same step. The last stage passes values from its first chunk to its second without an
    exchange. The input and the loss are both on stage 0.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`, as with `"1f1b"`.
    - In flight on stage s: `min(2S, M + min(M, s + 1))` microbatches, counted on each chunk. That
      is the activations of at most S whole stages, compared with up to `2S - 1` for `"1f1b"`.
    - Use it if the activations of `"1f1b"` do not fit, before you pay for recompute. Steps are half
      as long, and there are twice as many.

    Reference:
        Qi et al. (2024), "Pipeline Parallelism with Controllable Memory": the V-shaped placement,
        with its order on combined ticks.
    """

    def num_steps(self) -> int:
        """`2M + 4S - 3`."""
        return 2 * self.micro_batches + 4 * self.stages - 3

    def forward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and microbatch m with `2m + p = step`."""
        return self.downwards(step)

    def backward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and microbatch m with `2m + 4S - 2 - p = step`."""
        return self.upwards(step)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`(M + S - 1)(F + B)`."""
        return (self.micro_batches + self.stages - 1) * (forward_s + backward_s)
