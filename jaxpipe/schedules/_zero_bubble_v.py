"""Zero-bubble with folded chunks: split backwards, S microbatches in flight."""

import functools

from ._filled import FilledTimetable
from ._fold import FoldedTimetable
from ._timetable import Action


class ZeroBubbleVSchedule(FilledTimetable, FoldedTimetable):
    """ZB-V: `"1f1b-v"`, two folded chunks per stage, with split backwards: `"zero-bubble-v"`.

    The backward B is an input gradient I and a weight gradient W.

    The model is cut into `2S` virtual stages. Stage s holds virtual stages `s` and `2S - 1 - s`.
    Every second step, either a microbatch enters the first virtual stage or a gradient enters the
    last one. Both advance by one virtual stage per step, so a stage never has two of them in the
    same step. First S microbatches enter, then gradients and microbatches alternate, then the last
    S gradients enter. Virtual stage p runs the forward of microbatch m at step `2 max(m, 2m - S +
    1) + p` and its input gradient at step `2(m + max(S, min(S + m, M))) + 2S - 1 - p`. Weight
    gradients run where they cost least (`fill_weights`): in the steps in which a stage drains and
    has nothing else to do, and otherwise on all stages together, in every second step.

    - Makespan: `M(F + B) + (S - 1)(F + I - W)/2 + (M - (S + 1)/2) abs(F - I)` for `W <= min(F, I)`
      and `M >= S > 1`. At F = I = W this is `3M + (S - 1)/2` units, the minimum for any order of
      two chunks. Some stages run a forward in a step while others run an input gradient, so the
      step takes as long as the slower of the two. If F and I differ, as with recompute,
      `"zero-bubble"` is faster.
    - In flight on every stage: at most `2S` microbatches, counted on each chunk, which is S whole
      stages. With many microbatches every stage reaches this number. Residuals are kept until their
      weight gradient has run.
    - Pending, from I to W: at most S, counted on each chunk, for `M >= S`, compared with `2S - 1`
      for `"zero-bubble"`.
    - Use it if the bubble matters and the activations of `"zero-bubble"` do not fit.

    Reference:
        Qi et al. (2024), "Pipeline Parallelism with Controllable Memory": ZB-V, re-timed so that
        the stages run in lockstep.
    """

    def num_unfilled_steps(self) -> int:
        """`2b + 2S`, where b is the turn of the last gradient."""
        return 2 * max(self._gradients) + 2 * self.stages

    def forward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and the microbatch that entered p steps ago."""
        chunk, turn = self.downwards(step)
        return chunk, self._microbatches.get(turn, -1)

    def backward_at(self, step: int) -> Action:
        """Virtual stage p, `s` or `2S - 1 - s`, and the microbatch of the gradient that it runs.

        The gradient entered `2S - 1 - p` steps ago.
        """
        chunk, turn = self.upwards(step + 2 * self.stages - 1)
        return chunk, self._gradients.get(turn, -1)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """`M(F + B) + (S - 1)(F + I - W)/2 + (M - (S + 1)/2) abs(F - I)`.

        None for fewer than S microbatches.
        """
        input_s = backward_s - weight_s
        work_s = self.micro_batches * (forward_s + backward_s)
        if self.micro_batches < self.stages:
            return None
        if self.stages == 1:
            return work_s
        mixed_s = (self.micro_batches - (self.stages + 1) / 2) * abs(forward_s - input_s)
        return work_s + (self.stages - 1) * (forward_s + input_s - weight_s) / 2 + mixed_s

    @functools.cached_property
    def _microbatches(self) -> dict[int, int]:
        """Microbatches by the turn in which they enter; a turn is two steps."""
        return {max(m, 2 * m - self.stages + 1): m for m in range(self.micro_batches)}

    @functools.cached_property
    def _gradients(self) -> dict[int, int]:
        """Microbatches by the turn in which their gradients enter."""
        stages = self.stages
        micro_batches = self.micro_batches
        # The first free turn after a microbatch has passed all virtual stages.
        return {m + max(stages, min(stages + m, micro_batches)): m for m in range(micro_batches)}
