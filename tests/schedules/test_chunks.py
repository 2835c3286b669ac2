"""Schedules with several chunks a stage: what they promise, against what their programs show."""

import pytest

from jaxpipe.schedules import (
    MAX_RUNS,
    InterleavedSchedule,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    TickProgram,
    closed_form,
    format_grid,
    lower_schedule,
    makespan,
    resolve_schedule,
)

COUNTS = (1, 2, 3, 4, 7, 8, 16, 32)


def in_flight(program: TickProgram) -> list[int]:
    return [program.in_flight(stage) for stage in range(program.num_stages)]


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_runs_say_whether_forward_and_backward_are_of_one_chunk(name: str, num_chunks: int) -> None:
    program = lower_schedule(resolve_schedule(name, num_chunks), 8, 4)
    assert all(run.has_one_chunk for run in program.runs) == (num_chunks == 1)


def test_forward_and_backward_of_folded_chunks_are_of_one_chunk() -> None:
    assert all(run.has_one_chunk for run in lower_schedule(OneFOneBVSchedule, 8, 4).runs)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_folded_chunks(num_stages: int) -> None:
    for count in COUNTS:
        program = lower_schedule(OneFOneBVSchedule, count, num_stages)
        assert program.num_ticks == 2 * count + 4 * num_stages - 3
        for forward_s, backward_s in ((1.0, 2.0), (3.0, 2.0)):
            expected = (count + num_stages - 1) * (forward_s + backward_s)
            assert makespan(program, forward_s, backward_s) == expected
            assert makespan(program, forward_s, backward_s, skip_idle=False) == expected
            assert closed_form("1f1b-v", count, num_stages, forward_s, backward_s) == expected
        assert in_flight(program) == [
            min(2 * num_stages, count + min(count, s + 1)) for s in range(num_stages)
        ]
        assert len(program.runs) <= 3
        assert program.unbuffered.activations.recv
        assert program.unbuffered.gradients.recv
        assert program.unbuffered.pending
        assert program.depth.activations.local == program.depth.gradients.local == 1


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_interleaved_chunks(num_stages: int, num_chunks: int) -> None:
    kind = resolve_schedule("interleaved", num_chunks)
    for count in COUNTS:
        program = lower_schedule(kind, count, num_stages)
        expected = (count + (num_stages - 1) / num_chunks) * 3.0
        if count < num_stages:
            expected = (num_stages + (count - 1) / num_chunks) * 3.0
        assert makespan(program, 1.0, 2.0) == pytest.approx(expected)
        assert makespan(program, 1.0, 2.0, skip_idle=False) == pytest.approx(expected)
        assert closed_form(
            "interleaved", count, num_stages, 1.0, 2.0, num_chunks=num_chunks
        ) == pytest.approx(expected)
        assert expected <= (count + num_stages - 1) * 3.0 + 1e-9
        largest_group = -(-count // max(1, count // num_stages))
        assert in_flight(program) == [
            (num_chunks - 1) * largest_group + min(count, 2 * (num_stages - 1 - s) + 1)
            for s in range(num_stages)
        ]
        assert len(program.runs) <= 3
        # What comes round the ring waits for the rest of a group of more than S.
        assert program.unbuffered.activations.recv == (largest_group <= num_stages)
        assert program.unbuffered.gradients.recv == (largest_group <= num_stages)
        assert program.unbuffered.pending


def test_one_chunk_on_the_ring_is_1f1b() -> None:
    class OneChunk(InterleavedSchedule):
        num_chunks = 1

    for stage in range(4):
        assert list(OneChunk(6, 4, stage)) == list(OneFOneBSchedule(6, 4, stage))


def test_grids() -> None:
    assert (
        format_grid(OneFOneBVSchedule, 2, 2)
        == """\
step     0    1    2    3        4        5        6    7    8
stage 0  0F0  .    0F1  3F0+3B0  .        3F1+3B1  0B0  .    0B1
stage 1  .    1F0  2F0  1F1      2F1+2B0  1B0      2B1  1B1  ."""
    )
    assert (
        format_grid(InterleavedSchedule, 2, 2)
        == """\
step     0    1    2    3        4        5    6    7
stage 0  0F0  0F1  2F0  2F1      2B0      2B1  0B0  0B1
stage 1  .    1F0  1F1  3F0+3B0  3F1+3B1  1B0  1B1  ."""
    )


def test_long_programs_with_chunks_have_few_runs() -> None:
    for name in ("1f1b-v", "interleaved", "zero-bubble"):
        counts = {len(lower_schedule(resolve_schedule(name), 8 * k, 4).runs) for k in (2, 4, 8)}
        assert len(counts) == 1
        assert counts.pop() <= MAX_RUNS


def test_instructions_name_their_chunk() -> None:
    first, *_ = OneFOneBVSchedule(2, 2, 0)
    assert repr(first[0]) == "LoadMicroBatch(buffer_id=0, micro_batch_id=0, chunk_id=0)"
