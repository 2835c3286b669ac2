"""The forwards of a training schedule, for evaluation on the same placement of chunks."""

import functools
from collections.abc import Iterator

from ._base import PipeSchedule
from ._inference import InferenceSchedule
from ._instructions import (
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    SendActivation,
)
from ._stages import listed_steps, stage_schedules

_FORWARD = (ForwardPass, LoadMicroBatch, RecvActivation, SendActivation)


def forward_schedule(schedule: type[PipeSchedule]) -> type[PipeSchedule]:
    """Return a forward-only schedule with the chunk placement of a training schedule.

    If the stages have one chunk each, in order, the result is `InferenceSchedule`. Otherwise it
    consists of the training schedule's forwards, without the steps in which no stage runs or moves
    anything. That makes `vM + S - 1` steps for `"interleaved"` with M of at least S, and `2M + 2S -
    2` for `"1f1b-v"`. Lower it with `training=False`.

    Example:
        >>> program = lower_schedule(forward_schedule(InterleavedSchedule), 8, 4, training=False)
        >>> program.num_chunks, program.num_ticks
        (2, 19)
    """
    if schedule.num_chunks == 1 and schedule.virtual_stage is PipeSchedule.virtual_stage:
        return InferenceSchedule

    class ForwardSchedule(schedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            listed = _forward_steps(schedule, self.micro_batches, self.stages)
            return (list(commands[self.stage_id]) for commands in listed)

    return ForwardSchedule


# The objects of all stages request the same listing one after another, and the next schedule does
# not need it.
@functools.lru_cache(maxsize=1)
def _forward_steps(
    schedule: type[PipeSchedule], num_microbatches: int, num_stages: int
) -> tuple[tuple[tuple[PipeInstruction, ...], ...], ...]:
    """List the instructions of forwards by step and stage, without steps that have none."""
    listed = [listed_steps(one) for one in stage_schedules(schedule, num_microbatches, num_stages)]
    steps = zip(
        *(
            [tuple(op for op in ops if isinstance(op, _FORWARD)) for ops in steps]
            for steps in listed
        ),
        strict=True,
    )
    return tuple(commands for commands in steps if any(commands))
