"""Zero-bubble with the chunks folded: split backwards, S microbatches in flight."""

import functools

from ._filled import FilledTimetable
from ._fold import FoldedTimetable
from ._timetable import Action


class ZeroBubbleVSchedule(FilledTimetable, FoldedTimetable):
    """ZB-V: `"1f1b-v"`, two folded chunks a stage, with the backward split: `"zero-bubble-v"`.

    The backward B is an input gradient I and a weight gradient W.

    The model is cut into `2S` parts; stage s holds parts `s` and `2S - 1 - s`. Every second step
    either a microbatch enters at the first part or a gradient at the last one, and both pass one
    part a step, so that no stage ever has two of them at once: S microbatches, then gradients and
    microbatches in turn, then the last S gradients. Part p runs the forward of microbatch m at step
    `2 max(m, 2m - S + 1) + p` and its input gradient at step `2(m + max(S, min(S + m, M))) + 2S - 1
    - p`. Weight gradients go where they cost least (`fill_weights`): into the steps in which a
    stage drains and has nothing else, and on all stages together, one for two of the other steps.

    - Makespan: `M(F + B) + (S - 1)(F + I - W)/2 + (M - (S + 1)/2) abs(F - I)` for `W <= min(F, I)`
      and `M >= S > 1`. At F = I = W this is `3M + (S - 1)/2` units, the least that any order of two
      chunks can take. As a step holds forwards on some stages and input gradients on others, it
      costs the longer: where these differ, as with recompute, `"zero-bubble"` is faster.
    - In flight on every stage: at most `2S` microbatches counted on each chunk, so S whole stages,
      a residual being kept until its weight gradient; for many microbatches exactly that on all
      stages.
    - Pending, from I to W: at most S counted on each chunk, where `"zero-bubble"` has `2S - 1`, for
      `M >= S`.
    - Use it where the bubble matters and the activations of `"zero-bubble"` do not fit.

    Reference:
        Qi et al. (2024), "Pipeline Parallelism with Controllable Memory", ZB-V, re-timed so that
        stages keep step.
    """

    def num_unfilled_steps(self) -> int:
        """`2b + 2S`, b being the turn of the last gradient."""
        return 2 * max(self._gradients) + 2 * self.stages

    def forward_at(self, step: int) -> Action:
        """Part p, `s` or `2S - 1 - s`, and the microbatch that entered p steps ago."""
        chunk, turn = self.downwards(step)
        return chunk, self._microbatches.get(turn, -1)

    def backward_at(self, step: int) -> Action:
        """Part p, `s` or `2S - 1 - s`, and the microbatch that entered `2S - 1 - p` steps ago.

        What entered then is its gradient.
        """
        chunk, turn = self.upwards(step + 2 * self.stages - 1)
        return chunk, self._gradients.get(turn, -1)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """`M(F + B) + (S - 1)(F + I - W)/2 + (M - (S + 1)/2) abs(F - I)`.

        None for fewer than S microbatches.
        """
        input_s, work_s = backward_s - weight_s, self.micro_batches * (forward_s + backward_s)
        if self.micro_batches < self.stages:
            return None
        if self.stages == 1:
            return work_s
        mixed_s = (self.micro_batches - (self.stages + 1) / 2) * abs(forward_s - input_s)
        return work_s + (self.stages - 1) * (forward_s + input_s - weight_s) / 2 + mixed_s

    @functools.cached_property
    def _microbatches(self) -> dict[int, int]:
        """Microbatches by the turn, two steps each, in which they enter."""
        return {max(m, 2 * m - self.stages + 1): m for m in range(self.micro_batches)}

    @functools.cached_property
    def _gradients(self) -> dict[int, int]:
        """Microbatches by the turn in which their gradients enter.

        When they have passed all parts, and it is free.
        """
        stages, micro_batches = self.stages, self.micro_batches
        return {m + max(stages, min(stages + m, micro_batches)): m for m in range(micro_batches)}
