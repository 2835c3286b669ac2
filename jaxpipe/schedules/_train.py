"""DeepSpeed's training schedule: 1F1B on a grid of half ticks."""

from collections.abc import Iterator

from ._base import PipeSchedule
from ._instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)


class TrainSchedule(PipeSchedule):
    """1F1B with either a forward or a backward in a step, never both: `"train"`.

    The instructions are exactly those of DeepSpeed.

    With M microbatches on S stages, stage s runs the forward of microbatch i at step `s + 2i` and
    its backward at step `2(S + i) - s - 1`. That makes `2(M + S - 1)` steps.

    - Makespan: `(M + S - 1)(F + B)` if stages do not run in lockstep. In lockstep, as in jaxpipe,
      almost every step has a forward on one stage and a backward on another and takes as long as
      the slower of the two: at least `2(M - 1) max(F, B)`.
    - In flight on stage s: `min(M, S - s)` microbatches.
    - Use it to minimise memory or to reproduce DeepSpeed's order. `"1f1b"` is faster unless B = F.

    Reference:
        Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training": PipeDream-flush.
        DeepSpeed's `TrainSchedule`.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each of the `2(M + S - 1)` half ticks."""
        num_steps = 2 * (self.micro_batches + self.stages - 1)
        num_buffers = self.num_pipe_buffers()
        for step in range(num_steps):
            # Forward m is at half tick 2m + s and its backward at 2(S + m) - s - 1. The difference
            # is odd, so a step never has both.
            if (step - self.stage_id) % 2 == 0:
                commands = self._forward_step(step, num_buffers)
            else:
                commands = self._backward_step(step, num_buffers)
            if step == num_steps - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """`max(2, min(S - s, M))`.

        The number of microbatches in flight, but at least two, as in DeepSpeed.
        """
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward_at(self, step: int) -> int:
        return (step - self.stage_id) // 2

    def _backward_at(self, step: int) -> int:
        return (step - (2 * self.stages - self.stage_id - 1)) // 2

    def _forward_step(self, step: int, num_buffers: int) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        microbatch = self._forward_at(step)
        before = self._backward_at(step - 1)
        buffer = microbatch % num_buffers
        runs = 0 <= microbatch < self.micro_batches
        if 0 <= before < self.micro_batches and not self.is_first_stage:
            commands.append(SendGrad(before % num_buffers))
        if runs and not self.is_first_stage:
            commands.append(RecvActivation(buffer))
        if runs and (self.is_first_stage or self.is_last_stage):
            commands.append(LoadMicroBatch(buffer))
        if runs:
            commands.append(ForwardPass(buffer))
        return commands

    def _backward_step(self, step: int, num_buffers: int) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        microbatch = self._backward_at(step)
        before = self._forward_at(step - 1)
        buffer = microbatch % num_buffers
        runs = 0 <= microbatch < self.micro_batches
        if runs and not self.is_last_stage:
            commands.append(RecvGrad(buffer))
        if 0 <= before < self.micro_batches and not self.is_last_stage:
            commands.append(SendActivation(before % num_buffers))
        if runs:
            commands.append(BackwardPass(buffer))
        return commands
