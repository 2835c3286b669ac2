from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    GPipeSchedule,
    InferenceSchedule,
    LoadMicroBatch,
    OneFOneBSchedule,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    TrainSchedule,
    check_schedule,
)

Build = Callable[[type[PipeSchedule], int, int], list[Any]]


def test_training_schedules_are_sound() -> None:
    for num_stages in range(1, 9):
        for schedule in [OneFOneBSchedule, GPipeSchedule, TrainSchedule]:
            for num_microbatches in range(1, 11):
                check_schedule(schedule, num_microbatches, num_stages)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_inference_schedules_are_sound(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        check_schedule(InferenceSchedule, num_microbatches, num_stages, training=False)


def test_an_order_other_than_first_in_first_out_is_followed(listed: Build) -> None:
    schedules = listed(GPipeSchedule, 2, 2)
    swap = {0: 1, 1: 0}
    for one in schedules:
        for commands in one.listing:
            for at, op in enumerate(commands):
                if isinstance(op, (BackwardPass, SendGrad, RecvGrad)):
                    commands[at] = type(op)(swap[op.buffer_id])
    check_schedule(schedules)


def test_a_later_activation_may_arrive_before_it_is_used(listed: Build) -> None:
    schedules = listed(OneFOneBSchedule, 3, 2)
    last = schedules[1]
    last.buffers = 3
    for commands in last.listing:
        commands[:] = [op for op in commands if not isinstance(op, BufferOpInstruction)]
    loads = [[LoadMicroBatch(m), ForwardPass(m), BackwardPass(m)] for m in range(3)]
    last.listing[1][:0] = [RecvActivation(0)]
    last.listing[2][:0] = [RecvActivation(1), *loads[0]]
    last.listing[3][:0] = [SendGrad(0), RecvActivation(2), *loads[1]]
    last.listing.append([])
    last.listing[4] = [SendGrad(1), *loads[2]]
    last.listing[5] = [SendGrad(2), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
    first = schedules[0]
    first.listing = [
        [LoadMicroBatch(0), ForwardPass(0)],
        [SendActivation(0), LoadMicroBatch(1), ForwardPass(1)],
        [SendActivation(1), LoadMicroBatch(2), ForwardPass(2)],
        [RecvGrad(0), SendActivation(2), BackwardPass(0)],
        [RecvGrad(1), BackwardPass(1)],
        [RecvGrad(2), BackwardPass(2), ReduceTiedGrads(), ReduceGrads(), OptimizerStep()],
    ]
    check_schedule(schedules)


def test_subclasses_of_instructions_mean_the_same(listed: Build) -> None:
    class NamedForward(ForwardPass):
        pass

    schedules = listed(OneFOneBSchedule, 4, 3)
    schedules[0].listing[0][1] = NamedForward(0, note="first")
    check_schedule(schedules)


def test_one_stage_needs_no_tied_reduction(listed: Build) -> None:
    schedules = listed(OneFOneBSchedule, 2, 1)
    schedules[0].listing[-1].remove(ReduceTiedGrads())
    check_schedule(schedules)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_chunked_and_split_schedules_are_sound(
    timed: dict[str, type[PipeSchedule]], num_stages: int
) -> None:
    for kind in timed.values():
        for num_microbatches in (1, 2, 4, 7):
            check_schedule(kind, num_microbatches, num_stages)


def test_chunks_hand_over_within_a_stage_in_time(timed: dict[str, type[PipeSchedule]]) -> None:
    class Late(timed["FoldedSchedule"]):  # type: ignore[misc]
        def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
            return super().forward_time(stage, chunk, microbatch) + (
                2 if chunk == 0 and microbatch == 1 else 0
            )

    match = (
        r"must come after the ForwardPass of the chunk before it, on this stage, but got "
        r"micro_batch_id=1 without it on stage=0 at step=3\. Put the ForwardPass of the chunk "
        r"before it, on this stage of this microbatch before"
    )
    with pytest.raises(ScheduleError, match=match) as caught:
        check_schedule(Late, 2, 1)
    assert "[1F1+1B1]" in str(caught.value)


def test_a_chunk_that_waits_for_another_of_its_stage(timed: dict[str, type[PipeSchedule]]) -> None:
    class Turned(timed["FoldedSchedule"]):  # type: ignore[misc]
        """Microbatches pass chunk 1 before chunk 0, which is examined first."""

        def virtual_stage(self, stage: int, chunk: int) -> int:
            return super().virtual_stage(stage, 1 - chunk)

    class Unfinished(Turned):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            yield from [list(commands) for commands in super().steps()][:-1]

    check_schedule(Turned, 1, 1)
    words = "chunk_id=0 without the backward of the chunk before it, on this stage. Add it"
    with pytest.raises(ScheduleError, match=words):
        check_schedule(Unfinished, 1, 1)


def test_large_grids_are_windowed_around_the_bad_cell(listed: Build) -> None:
    schedules = listed(OneFOneBSchedule, 200, 40)
    schedules[20].listing[120].pop()
    with pytest.raises(ScheduleError, match=r"stage=20") as caught:
        check_schedule(schedules)
    lines = str(caught.value).splitlines()
    assert max(map(len, lines[2:])) <= 112
    assert len(lines) <= 22
    assert any(line.startswith("stage 20") and "[F101B63]" in line for line in lines)
