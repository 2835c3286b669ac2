import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    DataParallelSchedule,
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


@pytest.mark.parametrize("schedule", [OneFOneBSchedule, GPipeSchedule, TrainSchedule])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_training_schedules_are_sound(schedule: type[PipeSchedule], num_stages: int) -> None:
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


@pytest.mark.parametrize(
    "op",
    [
        BackwardPass(0),
        BackwardInput(0),
        BackwardWeight(0),
        SendGrad(0),
        RecvGrad(0),
        ReduceGrads(),
        OptimizerStep(),
    ],
)
def test_forward_only_schedules_hold_forwards_only(listed: Build, op: PipeInstruction) -> None:
    schedules = listed(InferenceSchedule, 3, 2)
    schedules[1].listing[2].append(op)
    name = re.escape(repr(op))
    match = (
        rf"{name} must appear only in a training schedule, but got training=False on stage=1 at "
        r"step=2\. Remove it"
    )
    with pytest.raises(ScheduleError, match=match) as caught:
        check_schedule(schedules, training=False)
    assert "[F1" in str(caught.value)


def test_forward_only_schedules_finish(listed: Build) -> None:
    schedules = listed(InferenceSchedule, 3, 2)
    schedules[1].listing[3].clear()
    match = (
        r"Stage 1 must finish every microbatch, but got micro_batch_id=2, chunk_id=0 without "
        r"ForwardPass\. Add it"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(schedules, training=False)


def test_forward_only_buffers_are_not_overwritten(listed: Build) -> None:
    schedules = listed(InferenceSchedule, 3, 2)
    schedules[0].listing[1] = [LoadMicroBatch(0), SendActivation(0), ForwardPass(0)]
    match = (
        r"overwrite a live buffer, but got micro_batch_id=0 in it, which still needs "
        r"SendActivation, on stage=0"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(schedules, training=False)


def test_an_inference_schedule_does_not_train() -> None:
    match = (
        r"micro_batch_id=0 in it, which still needs BackwardPass or BackwardInput, on stage=0 at "
        r"step=2"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(InferenceSchedule, 3, 2)
    match = (
        r"Stage 0 must finish every microbatch, but got micro_batch_id=0, chunk_id=0 without "
        r"BackwardPass or "
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(InferenceSchedule, 2, 2)


def test_gradient_accumulation_is_no_pipeline() -> None:
    match = (
        r"BackwardPass\(buffer_id=0\) must come after RecvGrad, but got micro_batch_id=0 without "
        r"it on stage=0"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(DataParallelSchedule, 3, 2)
    check_schedule(DataParallelSchedule, 3, 1)


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


def test_with_chunks_what_enters_a_buffer_names_its_chunk(
    timed: dict[str, type[PipeSchedule]],
) -> None:
    class Nameless(timed["FoldedSchedule"]):  # type: ignore[misc]
        def steps(self) -> Iterator[list[PipeInstruction]]:
            for commands in super().steps():
                yield [
                    type(op)(op.buffer_id) if isinstance(op, BufferOpInstruction) else op
                    for op in commands
                ]

    match = (
        r"LoadMicroBatch\(buffer_id=0\) must name a chunk in \[0, num_chunks=2\), but got "
        r"chunk_id=None on stage=0"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(Nameless, 2, 2)


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


def test_chunks_of_one_stage_do_not_send_to_each_other(
    timed: dict[str, type[PipeSchedule]],
) -> None:
    class Sending(timed["FoldedSchedule"]):  # type: ignore[misc]
        def steps(self) -> Iterator[list[PipeInstruction]]:
            for step, commands in enumerate(super().steps()):
                yield [*([SendActivation(0)] if step == 1 else []), *commands]

    match = (
        r"SendActivation must have a partner on another stage, but got stage=0, step=1, "
        r"micro_batch_id=0, chunk_id=0"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(Sending, 2, 1)


def test_large_grids_are_windowed_around_the_bad_cell(listed: Build) -> None:
    schedules = listed(OneFOneBSchedule, 200, 40)
    schedules[20].listing[120].pop()
    with pytest.raises(ScheduleError, match=r"stage=20") as caught:
        check_schedule(schedules)
    lines = str(caught.value).splitlines()
    assert max(map(len, lines[2:])) <= 112
    assert len(lines) <= 22
    assert any(line.startswith("stage 20") and "[F101B63]" in line for line in lines)


@pytest.mark.parametrize("buffers", [0, -1, 1.5, None])
def test_buffers_are_counted(listed: Build, buffers: object) -> None:
    schedules = listed(OneFOneBSchedule, 2, 2)
    schedules[1].buffers = buffers
    match = (
        rf"must be a whole number of at least 1, but got num_pipe_buffers\(\)={buffers} on stage=1"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(schedules)


def test_endless_schedules_are_refused() -> None:
    class Endless(PipeSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            while True:
                yield []

    match = (
        r"steps\(\) must end, but got more than \d+ steps on stage=0 with micro_batches=2, "
        r"stages=2\. Stop after"
    )
    with pytest.raises(ScheduleError, match=match):
        check_schedule(Endless, 2, 2)
