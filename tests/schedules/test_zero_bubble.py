"""Zero-bubble.

The weight gradients go where they cost least, and no more than asked for are pending.
"""

from typing import ClassVar

import pytest
from _covering import sweep

from jaxpipe.schedules import (
    MAX_RUNS,
    TickProgram,
    ZeroBubbleSchedule,
    closed_form,
    format_grid,
    lower_schedule,
    makespan,
    resolve_schedule,
)
from jaxpipe.schedules._fill import fill_weights

COUNTS = (1, 2, 3, 4, 7, 8, 16, 32)


def zero_bubble(
    num_microbatches: int, num_stages: int, num_chunks: int, max_pending: int | None = None
) -> TickProgram:
    kind = resolve_schedule("zero-bubble", num_chunks, max_pending)
    return lower_schedule(kind, num_microbatches, num_stages)


def takes(program: TickProgram, forward_s: float, input_s: float, weight_s: float) -> float:
    return makespan(program, forward_s, input_s + weight_s, weight_s=weight_s)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_promises(num_stages: int, num_chunks: int) -> None:
    for count in COUNTS:
        program = zero_bubble(count, num_stages, num_chunks)
        assert len(program.runs) <= MAX_RUNS
        assert program.has_split_backward
        assert program.depth.pending <= 2 * num_stages - 1
        largest_group = -(-count // max(1, count // num_stages))
        assert program.peak_in_flight == min(
            num_chunks * count, (num_chunks - 1) * largest_group + 2 * num_stages - 1
        )
        if num_chunks > 1 and count < 2 * num_stages and count % num_stages:
            ideal = 3.0 * count + (num_stages - 1) / num_chunks
            assert ideal <= takes(program, 1.0, 1.0, 1.0)
            unsplit = closed_form("interleaved", count, num_stages, 1.0, 2.0, num_chunks=num_chunks)
            assert takes(program, 1.0, 1.0, 1.0) < unsplit
            continue
        for forward_s, input_s, weight_s in ((1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (2.0, 2.5, 2.0)):
            expected = closed_form(
                "zero-bubble",
                count,
                num_stages,
                forward_s,
                input_s + weight_s,
                weight_s=weight_s,
                num_chunks=num_chunks,
            )
            assert takes(program, forward_s, input_s, weight_s) == pytest.approx(expected)
            if num_chunks * (count - num_stages) >= num_stages - 2:
                bubble = (num_stages - 1) * (forward_s + input_s - weight_s) / num_chunks
                assert expected == pytest.approx(count * (forward_s + input_s + weight_s) + bubble)


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
@pytest.mark.parametrize("num_stages", range(2, 9))
def test_memory_of_many_microbatches(num_stages: int, num_chunks: int) -> None:
    stages, parts = range(num_stages), num_stages * num_chunks
    for count in (2 * num_stages, 4 * num_stages):
        program = zero_bubble(count, num_stages, num_chunks)
        flying = [parts + num_stages - 1 - (s > 0) for s in stages]
        assert [program.in_flight(s) for s in stages] == flying
        pending = [num_stages - 1 + s for s in stages]
        pending[-1] = max(2 * num_stages - 2 + (num_chunks > 1), num_stages)
        assert list(program.stage_depth.pending) == pending


@pytest.mark.parametrize(
    ("num_stages", "num_chunks"),
    sweep(4, [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2)], unpack=True),
)
def test_each_pending_half_less_costs_one(num_stages: int, num_chunks: int) -> None:
    count = 4 * num_stages
    most = 2 * num_stages - 2 + (num_chunks > 1)
    free = takes(zero_bubble(count, num_stages, num_chunks), 1.0, 1.0, 1.0)
    for limit in range(1, 2 * num_stages + 1):
        program = zero_bubble(count, num_stages, num_chunks, limit)
        assert program.depth.pending == min(limit, max(most, num_stages))
        assert takes(program, 1.0, 1.0, 1.0) == free + max(0, most - limit) / num_chunks
        assert len(program.runs) <= MAX_RUNS


def test_longer_weight_gradients_cost_the_difference() -> None:
    for num_stages, count, num_chunks in ((4, 16, 1), (8, 32, 1), (8, 32, 2)):
        program = zero_bubble(count, num_stages, num_chunks)
        promised = closed_form("zero-bubble", count, num_stages, 1.0, 3.0, num_chunks=num_chunks)
        assert promised == 4.0 * count + (num_stages - 1) / num_chunks
        longer = 0.5 * (num_stages - 1) / num_chunks
        assert takes(program, 1.0, 1.5, 1.5) == promised + longer < 1.03 * promised
        assert (
            takes(program, 1.0, 1.0, 1.5)
            == 3.5 * count + 0.5 * (num_stages - 1) / num_chunks + 2 * longer
        )


@pytest.mark.parametrize(("name", "num_chunks"), [("zero-bubble-h1", 1), ("zero-bubble-v", 2)])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_as_many_in_flight_as_stages(num_stages: int, name: str, num_chunks: int) -> None:
    for count in (*range(1, 13), 16, 32, 35):
        program = lower_schedule(name, count, num_stages)
        assert len(program.runs) <= MAX_RUNS
        assert program.unbuffered.activations.recv
        assert program.unbuffered.gradients.recv
        assert program.peak_in_flight == num_chunks * min(count, num_stages)
        if count < num_stages:
            continue
        assert program.depth.pending == num_stages
        least = 3.0 * count + (num_stages - 1) / num_chunks
        assert (
            takes(program, 1.0, 1.0, 1.0) == least == closed_form(name, count, num_stages, 1.0, 2.0)
        )
        for forward_s, input_s, weight_s in ((2.0, 3.0, 1.0), (3.0, 2.0, 2.0), (2.0, 4.0, 2.0)):
            work_s = count * (forward_s + input_s + weight_s)
            bubble_s = (num_stages - 1) * (forward_s + input_s - weight_s) / num_chunks
            mixed = (
                count - (1 if num_chunks == 1 else (num_stages + 1) / 2) if num_stages > 1 else 0
            )
            expected = work_s + bubble_s + mixed * abs(forward_s - input_s)
            assert takes(program, forward_s, input_s, weight_s) == pytest.approx(expected)
            promised = closed_form(
                name, count, num_stages, forward_s, input_s + weight_s, weight_s=weight_s
            )
            assert promised == pytest.approx(expected)


def test_fewer_pending_halves_cost_at_most_one_each() -> None:
    for name, num_chunks in (("zero-bubble-h1", 1), ("zero-bubble-v", 2)):
        least = takes(lower_schedule(name, 32, 8), 1.0, 1.0, 1.0)
        for limit in range(1, 9):
            program = lower_schedule(resolve_schedule(name, max_pending=limit), 32, 8)
            assert program.depth.pending == limit
            most = least + (8 - limit) / num_chunks + 2.0 * (num_chunks - 1)
            assert takes(program, 1.0, 1.0, 1.0) <= most


def test_the_goal() -> None:
    assert takes(zero_bubble(32, 8, 2), 1.0, 1.0, 1.0) == 32 * 3 + 7 / 2
    folded = lower_schedule("zero-bubble-v", 32, 8)
    assert (takes(folded, 1.0, 1.0, 1.0), folded.peak_in_flight / 2) == (99.5, 8)
    assert takes(lower_schedule("1f1b-v", 32, 8), 1.0, 1.0, 1.0) == 117


def test_the_steady_part_has_no_idle_action() -> None:
    program = zero_bubble(16, 4, 1)
    kinds = ("forward", "backward", "weight")
    content = ["".join(k[0] for k in kinds if getattr(run, f"has_{k}")) for run in program.runs]
    assert content == ["f", "fb", "fbw", "fbw", "bw", "w"]
    assert [run.stop - run.start for run in program.runs] == [3, 3, 10, 3, 3, 3]
    steady = program.runs[2]
    for actions in (program.tables.forward, program.tables.backward, program.tables.weight):
        assert all(
            microbatch >= 0
            for row in actions.microbatch
            for microbatch in row[steady.start : steady.stop]
        )


def test_grid() -> None:
    assert (
        format_grid(ZeroBubbleSchedule, 4, 3)
        == """\
step     0   1   2     3     4     5     6   7   8   9
stage 0  F0  F1  F2    F3    I0W0  I1W1  I2  I3  W2  W3
stage 1  .   F0  F1    F2I0  F3I1  I2W0  I3  W1  W2  W3
stage 2  .   .   F0I0  F1I1  F2I2  F3I3  W0  W1  W2  W3"""
    )


def test_grids_of_half_ticks() -> None:
    assert (
        format_grid("zero-bubble-h1", 4, 3)
        == """\
step     0   1   2   3   4   5     6   7   8   9   10  11  12
stage 0  F0  .   F1  .   F2  I0W0  F3  I1  W1  I2  W2  I3  W3
stage 1  .   F0  .   F1  I0  F2W0  I1  F3  I2  W1  I3  W2  W3
stage 2  .   .   F0  I0  F1  I1W0  F2  I2  F3  I3  W1  W2  W3"""
    )
    assert (
        format_grid("zero-bubble-v", 3, 2)
        == """\
step     0    1    2    3    4    5        6    7        8    9        10       11   12   13   14
stage 0  0F0  .    0F1  3F0  3I0  3F1+3W0  0F2  0I0+0W0  3I1  3F2+3W1  3I2+3W2  0I1  0W1  0I2  0W2
stage 1  .    1F0  2F0  1F1  2F1  2I0+2W0  1I0  1F2+1W0  2F2  2I1+2W1  1I1+1W1  2I2  1I2  2W2  1W2\
"""
    )


def test_one_pending_half_is_a_whole_backward() -> None:
    program = zero_bubble(8, 4, 1, 1)
    assert program.depth.pending == 1
    assert takes(program, 1.0, 1.0, 1.0) == takes(zero_bubble(8, 4, 1), 1.0, 1.0, 1.0) + 5


def test_classes_may_set_their_own_limit() -> None:
    class Frugal(ZeroBubbleSchedule):
        num_chunks = 2
        max_pending: ClassVar[int | None] = 3

    assert lower_schedule(Frugal, 8, 4).depth.pending == 3


def test_filling_rows_of_any_kind() -> None:
    forwards = [[True, True, False, False], [False, True, True, False]]
    backwards = [[False, False, True, True], [False, True, True, False]]
    assert fill_weights(forwards, backwards, 9) == ((-1, -1, 2, -1, 3), (-1, -1, -1, 1, 2))
    assert fill_weights(forwards, backwards, 1) == ((-1, -1, 2, -1, 3), (-1, 1, -1, 2, -1))


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_folded_combined_ticks_keep_their_time_whatever_actions_cost(num_stages: int) -> None:
    for count in (*range(1, 13), 16, 32, 35):
        program = lower_schedule("dual-pipe-v", count, num_stages)
        assert len(program.runs) <= MAX_RUNS
        assert (program.peak_in_flight, program.depth.pending) == (2 * min(count, num_stages), 1)
        if count < num_stages:
            continue
        for forward_s, input_s, weight_s in (
            (1.0, 1.0, 1.0),
            (2.0, 4.0, 2.0),
            (3.0, 2.0, 2.0),
            (1.0, 1.5, 1.5),
        ):
            expected = count * (forward_s + input_s + weight_s) + (num_stages - 1) * (
                forward_s + input_s
            )
            assert takes(program, forward_s, input_s, weight_s) == pytest.approx(expected)
            whole_s = input_s + weight_s
            promised = closed_form(
                "dual-pipe-v", count, num_stages, forward_s, whole_s, weight_s=weight_s
            )
            assert promised == pytest.approx(expected)


def test_with_recompute_folded_combined_ticks_are_the_fastest_with_so_little_in_flight() -> None:
    programs = {
        name: lower_schedule(name, 32, 8) for name in ("1f1b-v", "zero-bubble-v", "dual-pipe-v")
    }
    assert {one.peak_in_flight for one in programs.values()} == {16}
    seconds = {name: takes(one, 1.0, 2.0, 1.0) for name, one in programs.items()}
    assert seconds == {"1f1b-v": 156.0, "zero-bubble-v": 162.5, "dual-pipe-v": 149.0}
