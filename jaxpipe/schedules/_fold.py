"""The V placement: two chunks a stage, the model going down the stages and up again."""

from typing import ClassVar

from ._timetable import Action, TimetableSchedule


class FoldedTimetable(TimetableSchedule):
    """The model in `2S` parts, `s` and `2S - 1 - s` on stage s; values pass one part a step.

    What enters the first part in step `2k` (a microbatch forwards) passes part p in step `2k + p`;
    what enters the last part in step `2k + 2S - 1` (a gradient backwards) passes part p in step `2k
    + 4S - 2 - p`. So a stage never has two of either in one step. What the last stage hands from
    its first chunk to its second needs no exchange; the input and the loss are both on stage 0.
    """

    num_chunks: ClassVar[int] = 2

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """`s` for the first chunk, `2S - 1 - s` for the second."""
        return stage if chunk == 0 else 2 * self.stages - 1 - stage

    def downwards(self, step: int) -> Action:
        """Chunk and number k of what passes towards the model's end: `2k + p = step`."""
        return self._passing(step, direction=1)

    def upwards(self, step: int) -> Action:
        """Chunk and number k of what passes towards the model's beginning.

        `2k + 4S - 2 - p = step`.
        """
        return self._passing(step - (4 * self.stages - 2), direction=-1)

    def _passing(self, since: int, *, direction: int) -> Action:
        # Of s and 2S - 1 - s one is even and one odd, so in each step exactly one of the chunks is
        # due.
        chunk = (since - self.stage_id) % 2
        return chunk, (since - direction * self.virtual_stage(self.stage_id, chunk)) // 2
