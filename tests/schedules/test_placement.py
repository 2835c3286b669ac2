import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import OneFOneBSchedule, PipeSchedule, check_schedule, lower_schedule


def test_the_ring_is_the_default(timed: dict[str, type[PipeSchedule]]) -> None:
    assert lower_schedule(timed["ThreeRingSchedule"], 4, 2).placement.virtual == (
        (0, 2, 4),
        (1, 3, 5),
    )
    assert lower_schedule(timed["FoldedSchedule"], 4, 3).placement.virtual == (
        (0, 5),
        (1, 4),
        (2, 3),
    )
    assert lower_schedule(OneFOneBSchedule, 4, 3).placement.virtual == ((0,), (1,), (2,))


class Twice(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return 0


class Outside(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage + 1


class Jumping(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return (0, 2, 1, 3)[stage]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Twice,
            "a different number for every chunk in [0, 4), but got virtual_stage(stage=1, "
            "chunk=0)=0. Return each number exactly",
        ),
        (
            Outside,
            "a different number for every chunk in [0, 4), but got virtual_stage(stage=3, "
            "chunk=0)=4. Return each number exactly",
        ),
        (
            Jumping,
            "but got virtual stage 0 on stage=0 and 1 on stage=2. Change virtual_stage so that "
            "each hop",
        ),
    ],
)
def test_bad_placements_are_refused(kind: type[PipeSchedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedule(kind, 4, 4)


def test_chunks_are_counted() -> None:
    class Chunkless(OneFOneBSchedule):
        num_chunks = 0

    with pytest.raises(
        ScheduleError, match=r"num_chunks must be at least 1, but got num_chunks=0\. Set it to 1"
    ):
        check_schedule(Chunkless, 2, 2)


@pytest.mark.parametrize(("num_microbatches", "num_stages"), [(None, 2), (2, None), (None, None)])
def test_classes_need_sizes(num_microbatches: int | None, num_stages: int | None) -> None:
    match = rf"but got num_microbatches={num_microbatches}, num_stages={num_stages}\. Pass both"
    with pytest.raises(ScheduleError, match=match):
        check_schedule(OneFOneBSchedule, num_microbatches, num_stages)


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"micro_batches=0"):
        check_schedule(OneFOneBSchedule, 0, 2)
    with pytest.raises(ScheduleError, match=r"stages=0"):
        check_schedule(OneFOneBSchedule, 2, 0)


def test_there_must_be_a_stage() -> None:
    with pytest.raises(
        ScheduleError, match=r"at least one stage, but got stages=0\. Pass one object per stage"
    ):
        check_schedule([])


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            [(4, 2, 0), (5, 2, 1)],
            "but got micro_batches=5 at index 1 of 2. Build that one with micro_batches=4",
        ),
        ([(4, 2, 0), (4, 3, 1)], "but got stages=3 at index 1 of 2. Build that one with stages=2"),
        (
            [(4, 2, 0), (4, 2, 0)],
            "but got stage_id=0 at index 1 of 2. Build that one with stage_id=1",
        ),
        ([(4, 2, 0)], "but got stages=2 at index 0 of 1. Build that one with stages=1"),
    ],
)
def test_objects_must_belong_together(others: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_schedule([OneFOneBSchedule(*sizes) for sizes in others])


def test_objects_must_fit_given_sizes(listed: Callable[..., list[Any]]) -> None:
    schedules = listed(OneFOneBSchedule, 4, 2)
    check_schedule(schedules, 4, 2)
    with pytest.raises(
        ScheduleError, match=r"but got micro_batches=4 at index 0 of 2\. Build that one with .*=8"
    ):
        check_schedule(schedules, 8, 2)
    with pytest.raises(
        ScheduleError, match=r"one schedule per stage, but got 1 for stages=2\. Pass all 2"
    ):
        check_schedule(schedules[:1], 4, 2)


def test_objects_must_have_equally_many_chunks(timed: dict[str, type[PipeSchedule]]) -> None:
    with pytest.raises(
        ScheduleError,
        match=r"but got num_chunks=1 at index 1 of 2\. Build that one with num_chunks=2",
    ):
        check_schedule([timed["FoldedSchedule"](4, 2, 0), OneFOneBSchedule(4, 2, 1)])
