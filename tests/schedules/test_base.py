from collections.abc import Iterator

import pytest

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


def test_steps_must_be_given() -> None:
    with pytest.raises(TypeError, match="abstract"):
        PipeSchedule(1, 1, 0)  # type: ignore[abstract]
