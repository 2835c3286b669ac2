"""Runs tick programs on symbolic values: every action must read exactly the value it should."""

import pytest

from jaxpipe.schedules import (
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TrainSchedule,
    check_schedule,
    forward_schedule,
    lower_schedule,
    resolve_schedule,
)
from jaxpipe.tools.prove import SymbolicRun, require_in_flight


@pytest.mark.parametrize("schedule", [OneFOneBSchedule, GPipeSchedule, TrainSchedule])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_training_programs_read_what_they_should(
    schedule: type[PipeSchedule], num_stages: int
) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(schedule, num_microbatches, num_stages)
        SymbolicRun(program).run()
        require_in_flight(program)
        assert program.unbuffered.activations.recv
        assert program.unbuffered.gradients.recv
        assert program.unbuffered.pending
        assert not program.has_split_backward
        boundary = int(num_stages > 1)
        assert program.depth.activations == program.depth.gradients == (boundary, boundary, 0)
        assert program.depth.pending == 0


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_inference_programs_read_what_they_should(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(InferenceSchedule, num_microbatches, num_stages, training=False)
        SymbolicRun(program).run()
        assert program.num_ticks == num_microbatches + num_stages - 1
        assert program.peak_in_flight == program.residual_slots == 0
        assert len(program.runs) == 1


@pytest.mark.parametrize("num_microbatches", range(1, 11))
def test_data_parallel_schedule_runs_on_one_stage(num_microbatches: int) -> None:
    program = lower_schedule(DataParallelSchedule, num_microbatches, 1)
    SymbolicRun(program).run()
    assert (program.num_ticks, program.peak_in_flight, len(program.runs)) == (
        num_microbatches,
        1,
        1,
    )


@pytest.mark.parametrize(
    "name",
    [
        "FoldedSchedule",
        "FoldedSplitSchedule",
        "RingSchedule",
        "ThreeRingSchedule",
        "SplitSchedule",
        "SplitAtOnceSchedule",
    ],
)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_chunked_and_split_programs_read_what_they_should(
    timed: dict[str, type[PipeSchedule]], name: str, num_stages: int
) -> None:
    for num_microbatches in range(1, 8):
        program = lower_schedule(timed[name], num_microbatches, num_stages)
        SymbolicRun(program).run()
        require_in_flight(program)
        assert program.has_split_backward == ("Split" in name)
        assert (program.depth.activations.local > 0) == (
            program.num_chunks > 1 and ("Folded" in name or num_stages == 1)
        )


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [
        ("1f1b-v", 2),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
        ("zero-bubble", 4),
    ],
)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_named_programs_read_what_they_should(name: str, num_chunks: int, num_stages: int) -> None:
    kind = resolve_schedule(name, num_chunks)
    for num_microbatches in (1, 2, 3, 4, 7, 8, 11):
        program = lower_schedule(kind, num_microbatches, num_stages)
        SymbolicRun(program).run()
        require_in_flight(program)
        for unbuffered, depth in zip(program.unbuffered[:2], program.depth[:2], strict=True):
            waits = num_microbatches > num_stages and num_microbatches % num_stages > 0
            assert unbuffered.recv == (not waits or name == "1f1b-v" or num_chunks == 1)
            if num_stages > 1:
                assert depth.send == 1
                assert depth.local <= 1


@pytest.mark.parametrize("max_pending", [1, 2, 4])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_limited_programs_read_what_they_should(max_pending: int, num_chunks: int) -> None:
    kind = resolve_schedule("zero-bubble", num_chunks, max_pending)
    for num_stages in (1, 3, 4):
        for num_microbatches in (1, 5, 8):
            program = lower_schedule(kind, num_microbatches, num_stages)
            SymbolicRun(program).run()
            require_in_flight(program)


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [("1f1b-v", 2), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 2)],
)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_their_forwards_read_what_they_should(name: str, num_chunks: int, num_stages: int) -> None:
    kind = resolve_schedule(name, num_chunks)
    for num_microbatches in (1, 3, 4, 8):
        program = lower_schedule(
            forward_schedule(kind), num_microbatches, num_stages, training=False
        )
        SymbolicRun(program).run()
        assert len(program.runs) == 1
        assert program.placement == lower_schedule(kind, num_microbatches, num_stages).placement
        if name == "1f1b-v":
            assert program.num_ticks == 2 * num_microbatches + 2 * num_stages - 2
        elif num_microbatches % num_stages == 0:
            assert program.num_ticks == num_chunks * num_microbatches + num_stages - 1


def test_forwards_of_one_chunk_are_inference() -> None:
    assert (
        forward_schedule(TrainSchedule)
        is forward_schedule(resolve_schedule("zero-bubble"))
        is InferenceSchedule
    )


def test_forwards_of_written_schedules(timed: dict[str, type[PipeSchedule]]) -> None:
    for name in ("FoldedSplitSchedule", "RingSchedule"):
        kind = forward_schedule(timed[name])
        check_schedule(kind, 5, 3, training=False)
        SymbolicRun(lower_schedule(kind, 5, 3, training=False)).run()
