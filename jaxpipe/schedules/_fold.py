"""The V placement: two chunks per stage, from the first to the last stage and back."""

from typing import ClassVar

from ._timetable import Action, TimetableSchedule


class FoldedTimetable(TimetableSchedule):
    """The model in `2S` virtual stages: stage s holds virtual stages `s` and `2S - 1 - s`.

    Values advance by one virtual stage per step. A microbatch that enters the first virtual stage
    in step `2k` reaches virtual stage p in step `2k + p`. A gradient that enters the last virtual
    stage in step `2k + 2S - 1` reaches virtual stage p in step `2k + 4S - 2 - p`. A stage therefore
    never has two microbatches or two gradients in one step. The last stage passes values from its
    first chunk to its second without an exchange. The input and the loss are both on stage 0.
    """

    num_chunks: ClassVar[int] = 2
    is_last_resort: ClassVar[bool] = True

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """`s` for the first chunk, `2S - 1 - s` for the second."""
        return stage if chunk == 0 else 2 * self.stages - 1 - stage

    def downwards(self, step: int) -> Action:
        """Chunk and number k of the microbatch that passes in the step: `2k + p = step`."""
        return self._passing(step, direction=1)

    def upwards(self, step: int) -> Action:
        """Chunk and number k of the gradient that passes in the step: `2k + 4S - 2 - p = step`."""
        return self._passing(step - (4 * self.stages - 2), direction=-1)

    def _passing(self, since: int, *, direction: int) -> Action:
        # One of s and 2S - 1 - s is even and the other is odd, so exactly one of the chunks is due
        # in each step.
        chunk = (since - self.stage_id) % 2
        return chunk, (since - direction * self.virtual_stage(self.stage_id, chunk)) // 2
