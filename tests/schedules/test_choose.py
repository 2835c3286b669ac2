"""Choosing a schedule: the shortest step that fits, and a table that says why."""

import dataclasses
import re

import pytest
from _covering import slow_after

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Choice,
    ShortSteps,
    StageCosts,
    choose_schedule,
    closed_form,
    lower_schedule,
    makespan,
    resolve_schedule,
    schedule_names,
)

COSTS = StageCosts(0.010, 0.011, 0.009, activation_bytes=1e9, pending_bytes=5e8)
GPU = dataclasses.replace(COSTS, tick_overhead_s=2e-4, branch_overhead_s=5e-5)


def chosen(choice: Choice) -> tuple[str, int, bool]:
    return choice.best.schedule, choice.best.num_chunks, choice.best.skip_idle


def test_steps_are_those_of_the_closed_forms() -> None:
    choice = choose_schedule(COSTS, 4, 16, skip_idle=True)
    assert [(one.schedule, one.num_chunks) for one in choice.candidates] == [
        ("1f1b", 1),
        ("1f1b-v", 2),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
        ("zero-bubble", 4),
        ("zero-bubble-h1", 1),
        ("zero-bubble-v", 2),
        ("dual-pipe-v", 2),
        ("train", 1),
    ]
    for one in choice.candidates:
        promised = closed_form(one.schedule, 16, 4, 0.010, 0.020, weight_s=0.009, num_chunks=one.num_chunks)
        assert one.step_s == pytest.approx(promised)
        program = lower_schedule(resolve_schedule(one.schedule, one.num_chunks), 16, 4)
        assert one.in_flight == program.residual_slots / one.num_chunks
        assert one.pending == program.depth.pending / one.num_chunks
        assert one.memory_bytes == one.in_flight * 1e9 + one.pending * 5e8
        assert one.num_ticks == program.num_ticks
        assert one.fits
    assert choice.ideal_s == pytest.approx(16 * 0.030)


@pytest.mark.parametrize(
    ("costs", "num_stages", "num_microbatches", "options", "expected"),
    slow_after(
        9,
        [
            (COSTS, 1, 8, {}, ("1f1b", 1, False)),
            (COSTS, 4, 1024, {}, ("1f1b", 1, False)),
            (GPU, 8, 32, {}, ("zero-bubble", 1, True)),
            (GPU, 8, 32, {"skip_idle": False}, ("interleaved", 4, False)),
            (dataclasses.replace(GPU, copy_s=2e-3), 8, 32, {"skip_idle": False}, ("1f1b", 1, False)),
            (dataclasses.replace(GPU, copy_s=2e-3), 8, 32, {"names": {"interleaved"}}, ("interleaved", 2, True)),
            (GPU, 8, 32, {"chunk_counts": {1: 1.0}}, ("zero-bubble", 1, True)),
            (GPU, 8, 32, {"memory_limit_bytes": 10e9}, ("interleaved", 4, False)),
            (GPU, 8, 32, {"memory_limit_bytes": 8.5e9}, ("dual-pipe-v", 2, True)),
            (GPU, 8, 32, {"memory_limit_bytes": 8.2e9}, ("1f1b-v", 2, False)),
            (GPU, 8, 32, {"memory_limit_bytes": 13e9, "chunk_counts": {1: 1.0}}, ("zero-bubble-h1", 1, True)),
            (GPU, 8, 32, {"memory_limit_bytes": 9.5e9, "chunk_counts": {1: 1.0}}, ("zero-bubble-h1", 1, True)),
            (GPU, 8, 32, {"memory_limit_bytes": 9e9, "chunk_counts": {1: 1.0}}, ("train", 1, True)),
            (GPU, 8, 32, {"memory_limit_bytes": 10.5e9, "chunk_counts": {2: 1.0}}, ("zero-bubble-v", 2, True)),
            (GPU, 8, 32, {"chunk_counts": {1: 1.0, 2: 4 / 3}}, ("zero-bubble", 1, True)),
            (dataclasses.replace(GPU, backward_s=0.014), 8, 32, {}, ("interleaved", 2, False)),
            (dataclasses.replace(GPU, tick_overhead_s=0.01), 8, 32, {"skip_idle": False}, ("1f1b", 1, False)),
        ],
        unpack=True,
    ),
)
def test_choices(
    costs: StageCosts, num_stages: int, num_microbatches: int, options: dict, expected: tuple[str, int, bool]
) -> None:
    choice = choose_schedule(costs, num_stages, num_microbatches, **options)
    assert chosen(choice) == expected
    assert choice.best.fits
    assert choice == choose_schedule(costs, num_stages, num_microbatches, **options)
    quicker = [one.step_s for one in choice.candidates if one.fits]
    assert choice.best.step_s <= 1.01 * min(quicker)


def test_pending_weight_gradients_are_limited_to_what_fits() -> None:
    choice = choose_schedule(GPU, 8, 32, memory_limit_bytes=16e9, chunk_counts={1: 1.0}, skip_idle=True)
    whole, limited = (one for one in choice.candidates if one.schedule == "zero-bubble")
    assert (whole.max_pending, whole.pending, whole.fits) == (None, 14, False)
    assert (limited.max_pending, limited.pending, limited.fits) == (2, 2, True)
    assert limited.memory_bytes == 16e9
    assert chosen(choice) == ("zero-bubble-h1", 1, True)


def test_pending_weight_gradients_stay_within_what_is_asked() -> None:
    options = {"memory_limit_bytes": 16e9, "chunk_counts": {1: 1.0}, "skip_idle": True}
    for asked, expected in ((1, [1]), (2, [2]), (3, [3, 2])):
        candidates = choose_schedule(GPU, 8, 32, max_pending=asked, **options).candidates
        assert [one.max_pending for one in candidates if one.schedule == "zero-bubble"] == expected


def test_only_numbers_of_chunks_that_are_asked_for_are_looked_at() -> None:
    assert {one.num_chunks for one in choose_schedule(GPU, 4, 8, chunk_counts={2: 1.0}).candidates} == {2}
    for wrong in ({}, {0: 1.0}, {2: 0.0}):
        with pytest.raises(
            ScheduleError, match=rf"chunk_counts must .* got chunk_counts={wrong}\. Give {{1: 1\.0}} for"
        ):
            choose_schedule(GPU, 4, 8, chunk_counts=wrong)


def test_uneven_chunks_cost_what_the_largest_does() -> None:
    even, uneven = (
        {(one.schedule, one.num_chunks): one.step_s for one in choose_schedule(COSTS, 4, 8, chunk_counts=n).candidates}
        for n in ({1: 1.0, 2: 1.0, 4: 1.0}, {1: 1.0, 2: 4 / 3})
    )
    assert even["interleaved", 2] == pytest.approx(closed_form("interleaved", 8, 4, 0.010, 0.020))
    assert uneven["interleaved", 2] == pytest.approx(4 / 3 * even["interleaved", 2])
    assert uneven["1f1b", 1] == even["1f1b", 1]
    assert ("interleaved", 4) in even
    assert ("interleaved", 4) not in uneven


def test_where_nothing_fits_the_smallest_is_chosen() -> None:
    choice = choose_schedule(GPU, 8, 32, memory_limit_bytes=1e9)
    assert not choice.best.fits
    assert choice.best.memory_bytes == min(one.memory_bytes for one in choice.candidates)
    assert str(choice).endswith(
        "1f1b-v: Nothing fits; this holds the least. Recompute activations, or use smaller microbatches."
    )


def test_the_table() -> None:
    text = str(choose_schedule(COSTS, 4, 16, memory_limit_bytes=6e9, chunk_counts={1: 1.0, 2: 1.0}, skip_idle=True))
    assert (
        text
        == """\
schedule        chunks  pending  idle actions  step      lost   in flight  memory
1f1b            1       -        skipped       570 ms    15.8%  7          7 GB     too large
1f1b-v          2       -        skipped       570 ms    15.8%  4          4 GB
interleaved     2       -        skipped       525 ms    8.6%   5.5        5.5 GB
zero-bubble     1       6        skipped       516 ms    7.0%   7          10 GB    too large
zero-bubble     2       3.5      skipped       498 ms    3.6%   5.5        7.25 GB  too large
zero-bubble     2       1        skipped       520.5 ms  7.8%   5.5        6 GB
zero-bubble-h1  1       4        skipped       531 ms    9.6%   5          7 GB     too large
zero-bubble-h1  1       2        skipped       549 ms    12.6%  5          6 GB
zero-bubble-v   2       2        skipped       511.5 ms  6.2%   4.5        5.5 GB   chosen
dual-pipe-v     2       0.5      skipped       543 ms    11.6%  4          4.25 GB
train           1       -        skipped       720 ms    33.3%  5          5 GB
zero-bubble-v: The simplest within 1% of the shortest step that fits 6 GB."""
    )


@pytest.mark.parametrize("num_microbatches", [17, 27, 53, 64])
def test_long_steps_are_extrapolated(num_microbatches: int) -> None:
    for one in choose_schedule(COSTS, 4, num_microbatches, skip_idle=True).candidates:
        program = lower_schedule(resolve_schedule(one.schedule, one.num_chunks), num_microbatches, 4)
        assert one.step_s == pytest.approx(makespan(program, 0.010, 0.020, weight_s=0.009))
        assert one.num_ticks == program.num_ticks
        assert one.in_flight == program.residual_slots / one.num_chunks


@pytest.mark.parametrize("name", schedule_names())
def test_every_named_schedule_says_whether_it_is_steady(name: str) -> None:
    schedule, num_microbatches = schedule_names()[name], 53
    steps = ShortSteps.of(schedule, num_microbatches, 4)
    whole, long, short = (lower_schedule(schedule, size, 4) for size in (num_microbatches, steps.long, steps.short))
    assert whole.num_ticks == steps.extended(long.num_ticks, short.num_ticks)
    assert whole.residual_slots == long.residual_slots
    assert whole.depth.pending == long.depth.pending


@pytest.mark.parametrize("costs", [StageCosts(0.0, 0.0, 0.0), StageCosts(1.0, 1.0, -1.0)])
def test_impossible_costs_are_refused(costs: StageCosts) -> None:
    match = re.escape(f"but got {costs}. Measure a stage's forward and backward, in seconds.")
    with pytest.raises(ScheduleError, match=match):
        choose_schedule(costs, 4, 8)
