from collections.abc import Callable
from itertools import product
from typing import Any

from jaxpipe.schedules import (
    ForwardPass,
    InferenceSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TrainSchedule,
    format_grid,
)


def test_combined_ticks() -> None:
    assert format_grid(OneFOneBSchedule, 3, 2).splitlines() == [
        "step     0   1     2     3     4",
        "stage 0  F0  F1    F2B0  B1    B2",
        "stage 1  .   F0B0  F1B1  F2B2  .",
    ]


def test_half_ticks() -> None:
    assert format_grid([TrainSchedule(2, 2, stage) for stage in range(2)]).splitlines() == [
        "step     0   1   2   3   4   5",
        "stage 0  F0  .   F1  B0  .   B1",
        "stage 1  .   F0  B0  F1  B1  .",
    ]


def test_forwards_only() -> None:
    assert format_grid(InferenceSchedule, 2, 2).splitlines()[1:] == [
        "stage 0  F0  F1  .",
        "stage 1  .   F0  F1",
    ]


def test_chunks_show_the_part_of_the_model(timed: dict[str, type[PipeSchedule]]) -> None:
    assert format_grid(timed["FoldedSchedule"], 1, 2).splitlines() == [
        "step     0    1    2    3        4    5    6",
        "stage 0  0F0  .    .    3F0+3B0  .    .    0B0",
        "stage 1  .    1F0  2F0  .        2B0  1B0  .",
    ]


def test_split_backwards(timed: dict[str, type[PipeSchedule]]) -> None:
    assert (
        format_grid(timed["SplitSchedule"], 2, 1).splitlines()[1] == "stage 0  F0I0  F1I1  W0  W1"
    )


def test_the_mark() -> None:
    lines = format_grid(OneFOneBSchedule, 3, 2, mark=(1, 2)).splitlines()
    assert lines[2] == "stage 1  .   F0B0  [F1B1]  F2B2  ."
    assert format_grid(OneFOneBSchedule, 3, 2, mark=(9, 99)) == format_grid(OneFOneBSchedule, 3, 2)


def test_wide_grids_are_cut() -> None:
    marks = (None, (0, 0), (2, 50), (3, 105))
    for mark, width in product(marks, (40, 60, 80, 120, 200)):
        lines = format_grid(OneFOneBSchedule, 100, 4, max_width=width, mark=mark).splitlines()
        assert all(len(line) <= width for line in lines), (mark, width)
        assert max(map(len, lines)) > width - 16, (mark, width)
        assert all("..." in line for line in lines), (mark, width)
        assert len({line.index("...") for line in lines}) == 1, (mark, width)
        if mark is not None:
            assert "[" in lines[1 + mark[0]], (mark, width)
        else:
            assert lines[1].startswith("stage 0  F0  F1"), width
            assert lines[1].endswith("B99"), width


def test_grids_that_fit_are_whole() -> None:
    whole = format_grid(OneFOneBSchedule, 3, 2)
    assert (
        format_grid(OneFOneBSchedule, 3, 2, max_width=max(map(len, whole.splitlines())), max_rows=2)
        == whole
    )


def test_tall_grids_are_cut() -> None:
    lines = format_grid(OneFOneBSchedule, 2, 30, max_rows=7).splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == [
        "step",
        *("stage 0", "stage 1", "stage 2"),
        "...",
        *("stage 27", "stage 28", "stage 29"),
    ]
    around = format_grid(OneFOneBSchedule, 2, 30, max_rows=7, mark=(10, 11)).splitlines()
    assert (around[1], around[-1]) == ("...", "...")
    assert any(line.startswith("stage 10") and "[F1]" in line for line in around)
    assert len(around) <= 8


def test_unsound_schedules_are_drawn(listed: Callable[..., list[Any]]) -> None:
    schedules = listed(OneFOneBSchedule, 3, 2)
    schedules[0].listing[2:] = [[ForwardPass(2, micro_batch_id=7)], None]
    schedules[1].listing[1].pop(0)
    schedules[1].listing[1].pop(0)
    schedules[1].listing[1].pop(0)
    lines = format_grid(schedules).splitlines()
    assert lines[1].rstrip() == "stage 0  F0  F1  F7    .     ."
    assert lines[2].startswith("stage 1  .   B?  F0B0")
