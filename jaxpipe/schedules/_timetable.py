"""Schedules defined by a timetable: what a stage works on at each step."""

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
"""A chunk of the stage and a microbatch. A microbatch outside `[0, micro_batches)` means none."""

NOTHING: Action = (0, -1)


class TimetableSchedule(PipeSchedule):
    """A training schedule that is defined only by its times: the instructions follow from them.

    Each hop takes one step: the result of a virtual stage reaches the next virtual stage (a
    gradient the previous one) in the following step. By default it is used in that step. If it is
    used later, `activation_at` and `gradient_at` return when it arrives. A step lists its exchanges
    (`SendGrad`, `RecvActivation`, `RecvGrad`, `SendActivation`), then `LoadMicroBatch` on the first
    and the last virtual stage, then the forward, the backward and the weight gradient. The last
    step ends with the reductions and the optimiser step. Values passed between two chunks of one
    stage are not sent.
    """

    split_backward: ClassVar[bool] = False
    """Whether `backward_at` returns only input gradients and `weight_at` the weight gradients."""

    @abstractmethod
    def num_steps(self) -> int:
        """Return the number of steps, the same on every stage.

        Returns:
            Number of steps.
        """

    @abstractmethod
    def forward_at(self, step: int) -> Action:
        """Return the forward that runs at a step.

        Args:
            step: A step, counted from 0.

        Returns:
            Chunk and microbatch. A microbatch outside `[0, micro_batches)` means none.
        """

    @abstractmethod
    def backward_at(self, step: int) -> Action:
        """Return the backward that runs at a step, whole or only its input gradient.

        Args:
            step: A step, counted from 0.

        Returns:
            Chunk and microbatch. A microbatch outside `[0, micro_batches)` means none.
        """

    def weight_at(self, step: int) -> Action:
        """Return the weight gradient that runs at a step.

        Args:
            step: A step, counted from 0.

        Returns:
            Chunk and microbatch. By default none.
        """
        return NOTHING

    def activation_at(self, step: int) -> Action:
        """Return the chunk and microbatch that receive an activation from another stage at a step.

        Args:
            step: A step, counted from 0.

        Returns:
            Chunk and microbatch. By default those of `forward_at`, which uses the activation in the
            same step.
        """
        return self.forward_at(step)

    def gradient_at(self, step: int) -> Action:
        """Return the chunk and microbatch that receive a gradient from another stage at a step.

        Args:
            step: A step, counted from 0.

        Returns:
            Chunk and microbatch. By default those of `backward_at`, which uses the gradient in the
            same step.
        """
        return self.backward_at(step)

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers: the maximum needed at the same time.

        Returns:
            The most microbatches in flight, counted on each chunk from the arrival of its
            activation. One more if a gradient is kept for another chunk of this stage, which uses
            it in the next step.
        """
        ends = self._ends()
        flying = peak = 0
        for step in range(self.num_steps()):
            # Count new buffers before freed ones: a step receives and runs its forward first, and a
            # unit that ends in a step still uses its buffer.
            flying += len(self._begun(step, ends))
            peak = max(peak, flying)
            flying -= len(self._freed(step, ends))
        return peak

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step, derived from the times and the chunk placement."""
        num_steps = self.num_steps()
        buffers = _Buffers(self.num_pipe_buffers(), named=self.num_chunks > 1)
        ends = self._ends()
        send_grad: list[PipeInstruction] = []
        send_act: list[PipeInstruction] = []
        for step in range(num_steps):
            forward = self.forward_at(step)
            backward = self.backward_at(step)
            weight = self.weight_at(step)
            # Results of a step are sent in the next one. Exchanges are in DeepSpeed's order: two
            # neighbours both list the gradient before the activation, so that blocking transfers
            # would match too.
            exchanges = send_grad
            last_exchange = send_act
            computing = list[PipeInstruction]()
            send_grad = []
            send_act = []
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
            # Free buffers last: a unit that ends in a step lives until the end of that step.
            buffers.free(self._freed(step, ends))
            if step == num_steps - 1:
                computing += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield exchanges + last_exchange + computing

    def _runs(self, action: Action) -> bool:
        return 0 <= action[1] < self.micro_batches

    def _begun(self, step: int, ends: list["_Ends"]) -> list[Action]:
        """Return the actions that take a buffer at a step."""
        # Their activation arrives in the step, or they need none and run in it.
        begun = (self.activation_at(step), True), (self.forward_at(step), False)
        return [
            action
            for action, arrives in begun
            if self._runs(action) and ends[action[0]].from_stage == arrives
        ]

    def _freed(self, step: int, ends: list["_Ends"]) -> list[Action]:
        """Return the actions whose buffers are free after a step."""
        last_of = self.weight_at if self.split_backward else self.backward_at
        # A gradient that stays on this stage is used one step later.
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
    """Neighbours of a chunk: the stages, if any, of the previous and the next virtual stage."""

    def __init__(self, stage: int, before: int | None, after: int | None) -> None:
        # The first virtual stage loads inputs from the batch, the last one loads labels.
        self.loads = before is None or after is None
        self.from_chunk = before == stage
        self.from_stage = before not in (None, stage)
        self.to_stage = after not in (None, stage)


class _Buffers:
    """Buffers of a stage. The one that has been free for the longest time is used first."""

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
