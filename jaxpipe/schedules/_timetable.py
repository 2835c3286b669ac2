"""Schedules given by a timetable: which microbatch a stage works on at each step."""

from abc import abstractmethod
from collections.abc import Iterator

from jaxpipe.schedules._base import PipeSchedule
from jaxpipe.schedules._instructions import (
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


class TimetableSchedule(PipeSchedule):
    """A training schedule that needs only its times: the instructions follow from them.

    Each hop takes one step: stage s + 1 runs a forward in the step after stage s did, stage s - 1 a backward in the
    step after stage s did. A step then lists its exchanges (`SendGrad`, `RecvActivation`, `RecvGrad`,
    `SendActivation`), `LoadMicroBatch` on the first and the last stage, the forward and the backward; the last step
    ends with the reductions and the optimizer step. Microbatch m lives in buffer `m % num_pipe_buffers()`.
    """

    @abstractmethod
    def num_steps(self) -> int:
        """Give the number of steps, the same on every stage.

        Returns:
            Number of steps.
        """

    @abstractmethod
    def forward_at(self, step: int) -> int:
        """Give the microbatch whose forward runs at a step.

        Args:
            step: A step, from 0.

        Returns:
            Its number; anything outside `[0, micro_batches)` means none.
        """

    @abstractmethod
    def backward_at(self, step: int) -> int:
        """Give the microbatch whose backward runs at a step.

        Args:
            step: A step, from 0.

        Returns:
            Its number; anything outside `[0, micro_batches)` means none.
        """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step.

        Returns:
            An iterator of instruction lists.
        """
        num_steps = self.num_steps()
        num_buffers = self.num_pipe_buffers()
        forward = backward = -1
        for step in range(num_steps):
            forward_before, backward_before = forward, backward
            forward = self._buffer(self.forward_at(step), num_buffers)
            backward = self._buffer(self.backward_at(step), num_buffers)
            commands = self._exchange(forward, backward, forward_before, backward_before)
            if forward >= 0:
                if self.is_first_stage or self.is_last_stage:
                    commands.append(LoadMicroBatch(forward))
                commands.append(ForwardPass(forward))
            if backward >= 0:
                commands.append(BackwardPass(backward))
            if step == num_steps - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _buffer(self, microbatch: int, num_buffers: int) -> int:
        return microbatch % num_buffers if 0 <= microbatch < self.micro_batches else -1

    def _exchange(
        self, forward: int, backward: int, forward_before: int, backward_before: int
    ) -> list[PipeInstruction]:
        commands: list[PipeInstruction] = []
        if not self.is_first_stage:
            if backward_before >= 0:
                commands.append(SendGrad(backward_before))
            if forward >= 0:
                commands.append(RecvActivation(forward))
        if not self.is_last_stage:
            if backward >= 0:
                commands.append(RecvGrad(backward))
            if forward_before >= 0:
                commands.append(SendActivation(forward_before))
        return commands
