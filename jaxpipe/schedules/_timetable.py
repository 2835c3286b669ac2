"""Schedules given by a timetable: what a stage works on at each step."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

from ._base import PipeSchedule
from ._instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
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

Action = tuple[int, int]
"""A chunk of the stage and a microbatch; a microbatch outside `[0, micro_batches)` means none."""

NOTHING: Action = (0, -1)


class TimetableSchedule(PipeSchedule):
    """A training schedule that needs only its times: the instructions follow from them.

    Each hop takes one step: what a part of the model computes is with the following part, or the
    preceding one if it is a gradient, in the step after. It is used there at once; where it waits,
    `activation_at` and `gradient_at` say when it arrives. A step then lists its exchanges
    (`SendGrad`, `RecvActivation`, `RecvGrad`, `SendActivation`), `LoadMicroBatch` on the first and
    the last part, the forward, the backward and the weight gradient; the last step ends with the
    reductions and the optimizer step. Values that stay on the stage, from one of its chunks to the
    next, are not sent.
    """

    split_backward: ClassVar[bool] = False
    """True if `backward_at` gives input gradients alone, and `weight_at` the weight gradients."""

    @abstractmethod
    def num_steps(self) -> int:
        """Give the number of steps, the same on every stage.

        Returns:
            Number of steps.
        """

    @abstractmethod
    def forward_at(self, step: int) -> Action:
        """Give what runs its forward at a step.

        Args:
            step: A step, from 0.

        Returns:
            Chunk and microbatch; a microbatch outside `[0, micro_batches)` means none.
        """

    @abstractmethod
    def backward_at(self, step: int) -> Action:
        """Give what runs its backward, whole or its input gradient, at a step.

        Args:
            step: A step, from 0.

        Returns:
            Chunk and microbatch; a microbatch outside `[0, micro_batches)` means none.
        """

    def weight_at(self, step: int) -> Action:
        """Give what runs the weight gradient of its backward at a step.

        Args:
            step: A step, from 0.

        Returns:
            Chunk and microbatch; by default none.
        """
        return NOTHING

    def activation_at(self, step: int) -> Action:
        """Give what receives its activation from another stage at a step.

        Args:
            step: A step, from 0.

        Returns:
            Chunk and microbatch; by default those of `forward_at`, which uses it in the same step.
        """
        return self.forward_at(step)

    def gradient_at(self, step: int) -> Action:
        """Give what receives its gradient from another stage at a step.

        Args:
            step: A step, from 0.

        Returns:
            Chunk and microbatch; by default those of `backward_at`, which uses it in the same step.
        """
        return self.backward_at(step)

    def num_pipe_buffers(self) -> int:
        """Give the number of buffers: the most that are needed at once.

        Returns:
            The most microbatches in flight, counted on each chunk from the arrival of its
            activation; one more where a gradient waits for the next step to be taken by another
            chunk of this stage.
        """
        ends = self._ends()
        flying = peak = 0
        for step in range(self.num_steps()):
            # Before what this step frees: a step receives and runs its forward first, and what ends
            # uses its buffer.
            flying += len(self._begun(step, ends))
            peak = max(peak, flying)
            flying -= len(self._freed(step, ends))
        return peak

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step, from the times and the placement of the chunks."""
        num_steps = self.num_steps()
        buffers = _Buffers(self.num_pipe_buffers(), named=self.num_chunks > 1)
        ends = self._ends()
        send_grad: list[PipeInstruction] = []
        send_act: list[PipeInstruction] = []
        for step in range(num_steps):
            forward, backward, weight = (
                self.forward_at(step),
                self.backward_at(step),
                self.weight_at(step),
            )
            # What a step computes is sent in the next one. Exchanges stand in DeepSpeed's order:
            # both of two neighbours list the gradient, then the activation, so that blocking
            # transfers would meet too.
            exchanges, last_exchange, computing = send_grad, send_act, list[PipeInstruction]()
            send_grad, send_act = [], []
            for action in self._begun(step, ends):
                buffer, names = buffers.take(action)
                exchanges = (
                    exchanges + [RecvActivation(buffer, **names)] * ends[action[0]].from_stage
                )
            gradient = self.gradient_at(step)
            if self._runs(gradient) and ends[gradient[0]].to_stage:
                buffer, names = buffers.find(gradient)
                exchanges = [*exchanges, RecvGrad(buffer, **names)]
            if self._runs(forward):
                end = ends[forward[0]]
                buffer, names = buffers.find(forward)
                computing += [
                    *[LoadMicroBatch(buffer, **names)] * end.loads,
                    ForwardPass(buffer, **names),
                ]
                send_act = [SendActivation(buffer, **names)] * end.to_stage
            if self._runs(backward):
                end = ends[backward[0]]
                buffer, names = buffers.find(backward)
                kind = BackwardInput if self.split_backward else BackwardPass
                computing.append(kind(buffer, **names))
                send_grad = [SendGrad(buffer, **names)] * end.from_stage
            if self._runs(weight):
                buffer, names = buffers.find(weight)
                computing.append(BackwardWeight(buffer, **names))
            # After all of the step has its buffers: what ends in a step lives until its end.
            buffers.free(self._freed(step, ends))
            if step == num_steps - 1:
                computing += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield exchanges + last_exchange + computing

    def _runs(self, action: Action) -> bool:
        return 0 <= action[1] < self.micro_batches

    def _begun(self, step: int, ends: list["_Ends"]) -> list[Action]:
        """The actions that take a buffer at a step.

        It brings their activation, or needs none and runs them.
        """
        begun = (self.activation_at(step), True), (self.forward_at(step), False)
        return [
            action
            for action, arrives in begun
            if self._runs(action) and ends[action[0]].from_stage == arrives
        ]

    def _freed(self, step: int, ends: list["_Ends"]) -> list[Action]:
        """The actions whose buffers are free after a step.

        A gradient kept on this stage is taken one step later.
        """
        last_of = self.weight_at if self.split_backward else self.backward_at
        done = (last_of(step), False), (last_of(step - 1), True)
        return [
            action
            for action, waits in done
            if self._runs(action) and ends[action[0]].from_chunk == waits
        ]

    def _ends(self) -> list["_Ends"]:
        chunks = range(self.num_chunks)
        stage_of = {
            self.virtual_stage(stage, chunk): stage
            for stage in range(self.stages)
            for chunk in chunks
        }
        parts = [self.virtual_stage(self.stage_id, chunk) for chunk in chunks]
        return [
            _Ends(self.stage_id, stage_of.get(part - 1), stage_of.get(part + 1)) for part in parts
        ]


class _Ends:
    """Neighbours of a chunk: the stages, if any, of the parts before and after it."""

    def __init__(self, stage: int, before: int | None, after: int | None) -> None:
        # The first part takes inputs from the batch, the last one labels.
        self.loads = before is None or after is None
        self.from_chunk = before == stage
        self.from_stage = before not in (None, stage)
        self.to_stage = after not in (None, stage)


class _Buffers:
    """Buffers of a stage, given out longest free first."""

    def __init__(self, count: int, *, named: bool) -> None:
        self._vacant = deque(range(count))
        self._buffer_of: dict[Action, int] = {}
        self._named = named

    def take(self, action: Action) -> tuple[int, dict[str, Any]]:
        self._buffer_of[action] = self._vacant.popleft()
        return self.find(action)

    def find(self, action: Action) -> tuple[int, dict[str, Any]]:
        names = {"micro_batch_id": action[1], "chunk_id": action[0]} if self._named else {}
        return self._buffer_of[action], names

    def free(self, actions: list[Action]) -> None:
        self._vacant += [self._buffer_of.pop(action) for action in actions]
