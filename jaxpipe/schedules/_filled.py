"""Timetables of forwards and input gradients, with weight gradients where they cost least."""

import functools
from abc import abstractmethod
from typing import ClassVar

from ._fill import IDLE, fill_weights
from ._timetable import NOTHING, Action, TimetableSchedule


class FilledTimetable(TimetableSchedule):
    """A timetable with split backwards.

    A subclass schedules the forwards and input gradients; `fill_weights` schedules the weight
    gradients.

    `max_pending` limits the weight gradients that a stage keeps pending, counted on each chunk. The
    default is `2S - 1`; a larger number hides no more of them.
    """

    min_pending: ClassVar[int | None] = 1
    split_backward: ClassVar[bool] = True

    @abstractmethod
    def num_unfilled_steps(self) -> int:
        """Return the number of steps up to the last input gradient, the same on every stage."""

    def num_steps(self) -> int:
        """Steps of forwards and input gradients, plus those with only weight gradients."""
        return len(self._filled()[0])

    def weight_at(self, step: int) -> Action:
        """Chunk and microbatch of the backward that `fill_weights` completes at the step."""
        row = self._filled()[self.stage_id]
        unit = row[step] if step >= 0 else IDLE
        return NOTHING if unit == IDLE else self.backward_at(unit)

    def _filled(self) -> tuple[tuple[int, ...], ...]:
        return _filled(type(self), self.micro_batches, self.stages)


@functools.lru_cache(maxsize=4)
def _filled(
    kind: type[FilledTimetable], num_microbatches: int, num_stages: int
) -> tuple[tuple[int, ...], ...]:
    """Fill the steps of all stages together; cached, as every stage's object needs the result."""
    stages = [kind(num_microbatches, num_stages, stage) for stage in range(num_stages)]
    steps = range(stages[0].num_unfilled_steps())
    there = range(num_microbatches)
    forwards = [[one.forward_at(step)[1] in there for step in steps] for one in stages]
    backwards = [[one.backward_at(step)[1] in there for step in steps] for one in stages]
    return fill_weights(forwards, backwards, kind.max_pending or 2 * num_stages - 1)
