import re
from collections.abc import Iterator

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    InterleavedSchedule,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    PipeInstruction,
    PipeSchedule,
    TrainSchedule,
    ZeroBubbleSchedule,
)

EVERY = [
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    InterleavedSchedule,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    TrainSchedule,
    ZeroBubbleSchedule,
]


@pytest.mark.parametrize("kind", EVERY)
def test_properties(kind: type[PipeSchedule]) -> None:
    one = kind(micro_batches=5, stages=3, stage_id=1)
    assert (one.micro_batches, one.stages, one.stage_id) == (5, 3, 1)
    assert (one.num_micro_batches, one.num_stages, one.stage) == (5, 3, 1)
    assert not one.is_first_stage
    assert not one.is_last_stage
    assert kind(5, 3, 0).is_first_stage
    assert kind(5, 3, 2).is_last_stage
    only = kind(5, 1, 0)
    assert only.is_first_stage
    assert only.is_last_stage


@pytest.mark.parametrize("kind", EVERY)
def test_iteration_starts_anew(kind: type[PipeSchedule]) -> None:
    one = kind(4, 2, 1)
    assert list(one) == list(one.steps()) == list(one)
    iterator = iter(one)
    assert next(iterator) == next(iter(one))


@pytest.mark.parametrize("kind", EVERY)
def test_buffers_are_those_counted(kind: type[PipeSchedule]) -> None:
    for stages in range(1, 6):
        for stage in range(stages):
            one = kind(4, stages, stage)
            used = {
                op.kwargs["buffer_id"]
                for commands in one
                for op in commands
                if "buffer_id" in op.kwargs
            }
            assert used <= set(range(one.num_pipe_buffers()))


class Idle(PipeSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield []


def test_defaults() -> None:
    one = Idle(6, 4, 2)
    assert one.num_pipe_buffers() == 6
    assert one.num_chunks == 1
    assert [one.virtual_stage(stage, chunk) for chunk in range(2) for stage in range(4)] == list(
        range(8)
    )


class Whole:
    def __index__(self) -> int:
        return 3


def test_sizes_may_be_any_whole_number() -> None:
    one = Idle(Whole(), Whole(), 2)  # type: ignore[arg-type]
    assert (one.micro_batches, one.stages) == (3, 3)
    assert type(one.micro_batches) is int


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (0, 2, 0),
            "micro_batches must be at least 1, but got micro_batches=0. Pass the number of "
            "microbatches",
        ),
        (
            (2, 0, 0),
            "stages must be at least 1, but got stages=0. Pass the number of pipeline stages",
        ),
        (
            (2, 2, 2),
            "stage_id must be in [0, stages=2), but got stage_id=2. Stages are counted from 0.",
        ),
        (
            (2, 2, -1),
            "stage_id must be in [0, stages=2), but got stage_id=-1. Stages are counted from 0.",
        ),
    ],
)
def test_bad_sizes_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        Idle(*sizes)


def test_steps_must_be_given() -> None:
    with pytest.raises(TypeError, match="abstract"):
        PipeSchedule(1, 1, 0)  # type: ignore[abstract]
