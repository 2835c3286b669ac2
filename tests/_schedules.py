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


class UserSchedule(PipeSchedule):
    """Built from the times of its actions; sends one step after the computing, one buffer for each microbatch."""

    weight_delay: ClassVar[int | None] = None

    def forward_time(self, stage: int, microbatch: int) -> int:
        raise NotImplementedError

    def backward_time(self, stage: int, microbatch: int) -> int:
        raise NotImplementedError

    def is_split(self, microbatch: int) -> bool:
        return self.weight_delay is not None

    def timed_steps(self) -> Iterator[tuple[int, int, PipeInstruction]]:
        """Step, place in the step, instruction."""
        s = self.stage_id
        for m in range(self.micro_batches):
            names = {"buffer_id": m, "micro_batch_id": m}
            if not self.is_first_stage:
                yield self.forward_time(s - 1, m) + 1, 0, RecvActivation(**names)
                yield self.backward_time(s, m) + 1, 0, SendGrad(**names)
            if not self.is_last_stage:
                yield self.forward_time(s, m) + 1, 0, SendActivation(**names)
                yield self.backward_time(s + 1, m) + 1, 0, RecvGrad(**names)
            if self.is_first_stage or self.is_last_stage:
                yield self.forward_time(s, m), 1, LoadMicroBatch(**names)
            yield self.forward_time(s, m), 2, ForwardPass(**names)
            if self.is_split(m):
                yield self.backward_time(s, m), 3, BackwardInput(**names)
                yield self.backward_time(s, m) + (self.weight_delay or 0), 4, BackwardWeight(**names)
            else:
                yield self.backward_time(s, m), 3, BackwardPass(**names)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        stages, microbatches = range(self.stages), range(self.micro_batches)
        end = max(self.backward_time(s, m) for s in stages for m in microbatches) + (self.weight_delay or 0)
        listing: list[list[PipeInstruction]] = [[] for _ in range(end + 1)]
        for step, _, command in sorted(self.timed_steps(), key=lambda timed: timed[:2]):
            listing[step].append(command)
        listing[end] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        return iter(listing)


class OneByOneSchedule(UserSchedule):
    """One microbatch after the other, the last one first, each through the whole model and back."""

    def forward_time(self, stage: int, microbatch: int) -> int:
        return (self.micro_batches - 1 - microbatch) * 2 * self.stages + stage

    def backward_time(self, stage: int, microbatch: int) -> int:
        return (self.micro_batches - microbatch) * 2 * self.stages - 1 - stage


class LastInFirstOutSchedule(UserSchedule):
    """All forwards, then all backwards in the opposite order."""

    def forward_time(self, stage: int, microbatch: int) -> int:
        return microbatch + stage

    def backward_time(self, stage: int, microbatch: int) -> int:
        return self.micro_batches + 2 * (self.stages - 1) - stage + self.micro_batches - 1 - microbatch


class SplitSchedule(UserSchedule):
    """1F1B on combined ticks, the weight gradient of each backward two steps after the input gradient."""

    weight_delay = 2

    def forward_time(self, stage: int, microbatch: int) -> int:
        return microbatch + stage

    def backward_time(self, stage: int, microbatch: int) -> int:
        return microbatch + 2 * (self.stages - 1) - stage


class SplitAtOnceSchedule(SplitSchedule):
    """Input and weight gradient in one step."""

    weight_delay = 0


class SplitByTurnsSchedule(SplitSchedule):
    """Every second backward whole."""

    def is_split(self, microbatch: int) -> bool:
        return microbatch % 2 == 1


class TwoChunkSchedule(PipeSchedule):
    """A schedule of two chunks a stage; only its number of chunks matters."""

    num_chunks = 2

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage if chunk == 0 else 2 * self.stages - 1 - stage

    def forward_at(self, stage: int, chunk: int, microbatch: int) -> int:
        return 2 * microbatch + self.virtual_stage(stage, chunk)

    def backward_at(self, stage: int, chunk: int, microbatch: int) -> int:
        return 2 * microbatch + 4 * self.stages - 2 - self.virtual_stage(stage, chunk)

    def num_pipe_buffers(self) -> int:
        return 2 * self.micro_batches

    def steps(self) -> Iterator[list[PipeInstruction]]:
        listing: list[list[PipeInstruction]] = [[] for _ in range(2 * self.micro_batches + 4 * self.stages)]
        for step, _, command in sorted(self._timed_steps(), key=lambda timed: timed[:2]):
            listing[step].append(command)
        listing[-1] += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
        return iter(listing)

    def _timed_steps(self) -> Iterator[tuple[int, int, PipeInstruction]]:
        last = 2 * self.stages - 1
        for chunk in range(2):
            virtual = self.virtual_stage(self.stage_id, chunk)
            for m in range(self.micro_batches):
                names = {"buffer_id": chunk * self.micro_batches + m, "micro_batch_id": m, "chunk_id": chunk}
                forward, backward = 2 * m + virtual, 2 * m + 4 * self.stages - 2 - virtual
                if virtual not in (0, self.stages):
                    yield forward, 0, RecvActivation(**names)
                    yield backward + 1, 0, SendGrad(**names)
                if virtual not in (self.stages - 1, last):
                    yield forward + 1, 0, SendActivation(**names)
                    yield backward, 0, RecvGrad(**names)
                if virtual in (0, last):
                    yield forward, 1, LoadMicroBatch(**names)
                yield forward, 2, ForwardPass(**names)
                yield backward, 3, BackwardPass(**names)
