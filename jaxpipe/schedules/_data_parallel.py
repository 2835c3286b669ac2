"""Gradient accumulation without a pipeline, as a schedule."""

from collections.abc import Iterator

from ._base import PipeSchedule
from ._instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
)


class DataParallelSchedule(PipeSchedule):
    """Plain gradient accumulation: each step loads, runs and differentiates one microbatch.

    Every stage holds the whole model, so it can be executed as a pipeline only with one stage.

    - Makespan: `M (F + B)`, no bubble.
    - Memory: one microbatch.

    Reference:
        DeepSpeed's `DataParallelSchedule`.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each of the `M` steps."""
        for microbatch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if microbatch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """1: each microbatch finishes before the next one starts."""
        return 1
