"""Hand-written schedules with chunks and split backwards, and schedules whose steps a test may spoil."""

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
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
    check_schedule,
)


class TimedSchedule(PipeSchedule):
    """Built from the times of its actions: sends one step after the computing, one buffer for each unit."""

    weight_delay: ClassVar[int | None] = None

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        raise NotImplementedError

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        raise NotImplementedError

    def num_pipe_buffers(self) -> int:
        return self.num_chunks * self.micro_batches

    def location(self, virtual: int) -> tuple[int, int] | None:
        places = [(stage, chunk) for stage in range(self.stages) for chunk in range(self.num_chunks)]
        return next((place for place in places if self.virtual_stage(*place) == virtual), None)

    def timed_steps(self) -> Iterator[tuple[int, int, list[PipeInstruction]]]:
        """Step, place in the step, instructions."""
        for chunk in range(self.num_chunks):
            virtual = self.virtual_stage(self.stage_id, chunk)
            before, after = self.location(virtual - 1), self.location(virtual + 1)
            for microbatch in range(self.micro_batches):
                buffer_id = chunk * self.micro_batches + microbatch
                names = {"buffer_id": buffer_id, "micro_batch_id": microbatch, "chunk_id": chunk}
                forward = self.forward_time(self.stage_id, chunk, microbatch)
                backward = self.backward_time(self.stage_id, chunk, microbatch)
                if before is not None and before[0] != self.stage_id:
                    yield self.forward_time(*before, microbatch) + 1, 0, [RecvActivation(**names)]
                    yield backward + 1, 0, [SendGrad(**names)]
                if after is not None and after[0] != self.stage_id:
                    yield forward + 1, 0, [SendActivation(**names)]
                    yield self.backward_time(*after, microbatch) + 1, 0, [RecvGrad(**names)]
                if before is None or after is None:
                    yield forward, 1, [LoadMicroBatch(**names)]
                yield forward, 2, [ForwardPass(**names)]
                if self.weight_delay is None:
                    yield backward, 3, [BackwardPass(**names)]
                else:
                    yield backward, 3, [BackwardInput(**names)]
                    yield backward + self.weight_delay, 4, [BackwardWeight(**names)]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        places = [(stage, chunk) for stage in range(self.stages) for chunk in range(self.num_chunks)]
        end = max(self.backward_time(*place, self.micro_batches - 1) for place in places) + (self.weight_delay or 0)
        listing: list[list[PipeInstruction]] = [[] for _ in range(end + 1)]
        for step, _, commands in sorted(self.timed_steps(), key=lambda timed: timed[:2]):
            listing[step] += commands
        listing[end] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        return iter(listing)


class FoldedSchedule(TimedSchedule):
    """Two chunks a stage, the first going down the stages, the second up again."""

    num_chunks = 2

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage if chunk == 0 else 2 * self.stages - 1 - stage

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return 2 * microbatch + self.virtual_stage(stage, chunk)

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return 2 * microbatch + 4 * self.stages - 2 - self.virtual_stage(stage, chunk)


class FoldedSplitSchedule(FoldedSchedule):
    """The same with the backward split."""

    weight_delay = 3


class RingSchedule(TimedSchedule):
    """Two chunks a stage on the ring."""

    num_chunks = 2

    def _round(self, microbatch: int) -> int:
        return microbatch // self.stages * self.stages * self.num_chunks + microbatch % self.stages

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return self._round(microbatch) + chunk * self.stages + stage

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        first = self.num_chunks * self.stages - 1
        turned = (self.num_chunks - 1 - chunk) * self.stages + self.stages - 1 - stage
        return first + self._round(microbatch) + turned


class ThreeRingSchedule(RingSchedule):
    """Three chunks a stage on the ring."""

    num_chunks = 3


class SplitSchedule(TimedSchedule):
    """1F1B on combined ticks, the weight gradient two steps after the input gradient."""

    weight_delay = 2

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return microbatch + stage

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return microbatch + 2 * (self.stages - 1) - stage


class SplitAtOnceSchedule(SplitSchedule):
    """Input and weight gradient in one step."""

    weight_delay = 0


class ListedSchedule(PipeSchedule):
    """Steps given as lists, to be spoiled."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int, listing: list[list[PipeInstruction]]) -> None:
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
            copy = ListedSchedule(micro_batches, stages, stage, [list(commands) for commands in one.steps()])
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
def refused(listed: Callable[..., list[ListedSchedule]]) -> Callable[[tuple[Any, ...], str, str], None]:
    """Spoils 1F1B (4 microbatches, 3 stages) and expects the error, with the marked cell in its grid."""

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
