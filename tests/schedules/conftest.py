"""Schedules whose steps a test may spoil, and those of `_schedules` by name."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from _schedules import (
    FoldedSchedule,
    FoldedSplitSchedule,
    RingSchedule,
    SplitAtOnceSchedule,
    SplitSchedule,
    ThreeRingSchedule,
)

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import OneFOneBSchedule, PipeInstruction, PipeSchedule, check_schedule


class ListedSchedule(PipeSchedule):
    """Steps given as lists, to be spoiled."""

    def __init__(
        self, micro_batches: int, stages: int, stage_id: int, listing: list[list[PipeInstruction]]
    ) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.listing = listing
        self.buffers: int = 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.listing)

    def num_pipe_buffers(self) -> int:
        return self.buffers


TIMED = {
    kind.__name__: kind
    for kind in (
        FoldedSchedule,
        FoldedSplitSchedule,
        RingSchedule,
        ThreeRingSchedule,
        SplitSchedule,
        SplitAtOnceSchedule,
    )
}


@pytest.fixture
def timed() -> dict[str, type[PipeSchedule]]:
    return dict(TIMED)


@pytest.fixture
def listed() -> Callable[[type[PipeSchedule], int, int], list[ListedSchedule]]:
    def build(kind: type[PipeSchedule], micro_batches: int, stages: int) -> list[ListedSchedule]:
        built: list[ListedSchedule] = []
        for stage in range(stages):
            one = kind(micro_batches, stages, stage)
            copy = ListedSchedule(
                micro_batches, stages, stage, [list(commands) for commands in one.steps()]
            )
            copy.buffers = one.num_pipe_buffers()
            built.append(copy)
        return built

    return build


def edit(listings: list[list[Any]], kind: str, *what: Any) -> None:
    if kind == "both":
        for one in what:
            edit(listings, *one)
    elif kind == "drop_last":
        last = listings[what[0]].pop()
        listings[what[0]][-1].extend(last)
    elif kind == "step":
        listings[what[0]][what[1]] = what[2]
    elif kind == "insert":
        stage, step, at, *ops = what
        listings[stage][step][at:at] = ops
    else:
        stage, step, op, *ops = what
        at = listings[stage][step].index(op)
        listings[stage][step][at : at + 1] = ops


@pytest.fixture
def refused(
    listed: Callable[..., list[ListedSchedule]],
) -> Callable[[tuple[Any, ...], str, str], None]:
    """Spoils 1F1B (4 microbatches, 3 stages) and expects the error.

    Its grid has the marked cell.
    """

    def check(spoil: tuple[Any, ...], match: str, cell: str) -> None:
        schedules = listed(OneFOneBSchedule, 4, 3)
        check_schedule(schedules)
        edit([one.listing for one in schedules], *spoil)
        with pytest.raises(ScheduleError, match=match) as caught:
            check_schedule(schedules)
        text = str(caught.value)
        assert re.search(r"^stage 2  ", text, re.MULTILINE)
        if cell:
            assert cell in text
            assert re.search(r"^Stage \d at step \d holds: ", text, re.MULTILINE)

    return check
