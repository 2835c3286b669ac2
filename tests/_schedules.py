"""Schedules as a user might write them."""

from collections.abc import Iterator
from typing import ClassVar

from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)


class TimedSchedule(PipeSchedule):
    """Built from the times of its actions.

    Sends one step after the computing, one buffer for each unit.
    """

    weight_delay: ClassVar[int | None] = None

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        raise NotImplementedError

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        raise NotImplementedError

    def is_split(self, microbatch: int) -> bool:
        return self.weight_delay is not None

    def num_pipe_buffers(self) -> int:
        return self.num_chunks * self.micro_batches

    def location(self, virtual: int) -> tuple[int, int] | None:
        places = [
            (stage, chunk) for stage in range(self.stages) for chunk in range(self.num_chunks)
        ]
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
                if self.is_split(microbatch):
                    yield backward, 3, [BackwardInput(**names)]
                    yield backward + (self.weight_delay or 0), 4, [BackwardWeight(**names)]
                else:
                    yield backward, 3, [BackwardPass(**names)]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        places = [
            (stage, chunk) for stage in range(self.stages) for chunk in range(self.num_chunks)
        ]
        last = max(
            self.backward_time(*place, m) for place in places for m in range(self.micro_batches)
        )
        end = last + (self.weight_delay or 0)
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


class SplitByTurnsSchedule(SplitSchedule):
    """Every second backward whole."""

    def is_split(self, microbatch: int) -> bool:
        return microbatch % 2 == 1


class TurnedSchedule(SplitByTurnsSchedule):
    """From the last stage to the first, every second backward split, its gradients in one step."""

    weight_delay = 0

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return self.stages - 1 - stage

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return super().forward_time(self.virtual_stage(stage, chunk), chunk, microbatch)

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return super().backward_time(self.virtual_stage(stage, chunk), chunk, microbatch)


class OneByOneSchedule(TimedSchedule):
    """One microbatch after the other, the last one first, each through the whole model and back."""

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return (self.micro_batches - 1 - microbatch) * 2 * self.stages + stage

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return (self.micro_batches - microbatch) * 2 * self.stages - 1 - stage


class LastInFirstOutSchedule(TimedSchedule):
    """All forwards, then all backwards in the opposite order."""

    def forward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return microbatch + stage

    def backward_time(self, stage: int, chunk: int, microbatch: int) -> int:
        return (
            self.micro_batches + 2 * (self.stages - 1) - stage + self.micro_batches - 1 - microbatch
        )
