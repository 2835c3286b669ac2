"""The tick program: a schedule as tables of integers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

from ._placement import Placement

T = TypeVar("T")

Row = tuple[int, ...]
"""`row[tick]` of one stage; -1 means that nothing happens."""

Table = tuple[Row, ...]
"""`table[stage][tick]`."""

Sends = Mapping[int, tuple[tuple[int, int], ...]]
"""Pairs `(source stage, target stage)`, by the distance from source to target on the ring."""


class Actions(NamedTuple, Generic[T]):
    """Actions of one kind: forward, backward or weight gradient. Idle stages have -1 in both."""

    microbatch: T
    chunk: T


class Transfers(NamedTuple, Generic[T]):
    """Path of one kind of value from the action that computes it to the action that uses it.

    The kinds are activations and gradients.

    Attributes:
        send: Slot of the send buffer that is sent in the tick's exchange.
        send_to: The stage that it is sent to.
        recv: Slot of the receive buffer for the value that arrives in the tick's exchange.
        recv_from: The stage that sends it.
        next_recv_from: `recv_from` of the next tick.
        read: Slot of the receive buffer that the tick's action reads.
        write: Slot of the send buffer for the action's result.
        local_read: Slot of the local buffer that the action reads, if the preceding chunk is on the
            same stage.
        local_write: Slot of the local buffer for the action's result, if the following chunk is on
            the same stage.
    """

    send: T
    send_to: T
    recv: T
    recv_from: T
    next_recv_from: T
    read: T
    write: T
    local_read: T
    local_write: T


class Tables(NamedTuple, Generic[T]):
    """Tables of a tick program.

    `Tables[Table]` is the whole program. The executor slices one device's `Tables[jax.Array]` of
    one tick out of it.

    Attributes:
        forward: Microbatches and chunks of forwards.
        backward: Microbatches and chunks of backwards, whole backwards and input gradients.
        weight: Microbatches and chunks of weight gradients of split backwards.
        activations: Transfers of activations, between forwards.
        gradients: Transfers of gradients, between backwards.
        residual_write: Slot for the residuals of the tick's forward.
        residual_read: Slot of the residuals that the tick's backward reads.
        weight_residual_read: Slot of the residuals that the tick's weight gradient reads.
        pending_write: Slot for the operands that a split backward leaves for its weight gradient;
            -1 if the backward is whole.
        pending_read: Slot of the operands that the weight gradient reads.
        input_microbatch: The microbatch that runs its forward on the first virtual stage in this
            tick, broadcast to all stages.
        next_input_microbatch: `input_microbatch` of the next tick.
        loss_microbatch: The microbatch that runs its loss in this tick, broadcast to all stages. It
            is the microbatch of the forward on the last virtual stage in this tick, or in the
            previous tick if losses are delayed.
        loss_gradient_write: On the stage of the last virtual stage, the slot of that forward's
            residuals.
        last_input_grad_microbatch: The microbatch that ran its backward on the first virtual stage
            in the previous tick, broadcast to all stages.
    """

    forward: Actions[T]
    backward: Actions[T]
    weight: Actions[T]
    activations: Transfers[T]
    gradients: Transfers[T]
    residual_write: T
    residual_read: T
    weight_residual_read: T
    pending_write: T
    pending_read: T
    input_microbatch: T
    next_input_microbatch: T
    loss_microbatch: T
    loss_gradient_write: T
    last_input_grad_microbatch: T


class TransferBuffers(NamedTuple, Generic[T]):
    """One entry for each buffer of one kind of transferred value."""

    # Values that have arrived and are not used yet.
    recv: T
    # Values that were computed and are not sent yet.
    send: T
    # Values passed between two chunks of one stage.
    local: T


class Buffers(NamedTuple, Generic[T]):
    """One entry for each buffer of a stage."""

    activations: TransferBuffers[T]
    gradients: TransferBuffers[T]
    # From a forward to its backward.
    residuals: T
    # The operands that an input gradient leaves for its weight gradient.
    pending: T


_STRUCTURES: tuple[Callable[..., Any], ...] = (Tables, Transfers, Actions, Buffers, TransferBuffers)


def map_fields(function: Callable[..., Any], *structures: Any) -> Any:
    """Map a function over corresponding fields of named tuples of this module."""
    make: Callable[..., Any] = type(structures[0])  # pyright: ignore[reportUnknownVariableType]
    if make in _STRUCTURES:
        return make(*(map_fields(function, *each) for each in zip(*structures, strict=True)))
    return function(*structures)


class Idle(Enum):
    """What a device does in a tick in which it has no action of a kind. Values are for printing."""

    NEVER = "never idle"
    """No stage is idle in the run, so there is nothing to do."""

    COMPUTE = "computed"
    """Compute on whatever is in the buffers and keep the result: it is zero or nothing reads it."""

    MASK = "computed and dropped"
    """Compute on whatever is in the buffers and replace the result with zeros."""

    BRANCH = "branched around"
    """Take the branch of a switch that returns zeros."""

    LOOP = "looped"
    """Run no iteration of a loop that otherwise runs one and writes its result in place."""


@dataclass(frozen=True)
class ActionMode:
    """How the actions of one kind run in a run of ticks.

    Attributes:
        idle: What a stage does in a tick in which it has no action of this kind.
        chunks: Chunks of the actions, on any stage.
        splits: For backwards, whether they are whole (False) or only input gradients (True), in
            this order if both occur. Empty for other kinds.
        branches_on_chunk: Whether several chunks are branches of one switch. Otherwise the tick's
            chunk is an index into the stacked weights of all chunks.
        adds_in_loops: Whether gradients are added to the sums of their chunk by a zero-or-one-
            iteration loop for each chunk.
    """

    idle: Idle
    chunks: tuple[int, ...]
    splits: tuple[bool, ...] = ()
    branches_on_chunk: bool = True
    adds_in_loops: bool = False

    @property
    def has_branches(self) -> bool:
        """Whether the action is one of several branches of a switch."""
        is_one_of_many = len(self.splits) > 1 or (self.branches_on_chunk and len(self.chunks) > 1)
        return is_one_of_many or self.idle is Idle.BRANCH


@dataclass(frozen=True)
class TickRun:
    """Consecutive ticks with the same kinds of computation, over all stages.

    Attributes:
        start: The first tick.
        stop: The tick after the last one.
        activation_sends: Which stages send activations to which in the exchanges of these ticks.
        next_activation_sends: The same for ticks `start + 1` to `stop`, which send the results of
            this run's forwards if results are sent without a buffer.
        gradient_sends: Which stages send gradients to which.
        has_one_chunk: Whether the forward and the backward that a stage runs in one tick always
            have the same chunk.
        forward: How forwards run; None if no stage has a forward in these ticks. The same holds for
            `backward` and `weight`.
        backward: How backwards run, whole backwards and input gradients.
        weight: How weight gradients of split backwards run.
        loss: What stages do in ticks in which they take no part in a loss.
        first: If all stages run the model's first layers, what they do in ticks that do not need
            them. In training these layers run for the forward of the next tick.
        first_backward: What stages do in ticks without a backward of these layers.
        receives_first: Whether the exchanges of a tick end before its forward begins.
    """

    start: int
    stop: int
    activation_sends: Sends
    next_activation_sends: Sends
    gradient_sends: Sends
    has_one_chunk: bool
    forward: ActionMode | None
    backward: ActionMode | None
    weight: ActionMode | None
    loss: Idle | None = None
    first: Idle | None = None
    first_backward: Idle | None = None
    receives_first: bool = False

    @property
    def has_forward(self) -> bool:
        """Whether some stage runs a forward."""
        return self.forward is not None

    @property
    def has_backward(self) -> bool:
        """Whether some stage runs a backward, whole or only the input gradient."""
        return self.backward is not None

    @property
    def has_weight(self) -> bool:
        """Whether some stage runs the weight gradient of a split backward."""
        return self.weight is not None


@dataclass(frozen=True)
class TickProgram:
    """Actions of every stage in every tick, and the slot of each value.

    A tick is a step of the schedule. It has four phases, in this order (`a` is short for
    `tables.activations` and `g` for `tables.gradients`):

    1. Exchange: slot `a.send` of the activations' send buffer is sent to stage `a.send_to`, which
       writes it to slot `a.recv` of its receive buffer. Gradients are sent in the same way, by `g`.
    2. Forward of chunk `forward.chunk` and microbatch `forward.microbatch` (-1: idle). Its input is
       slot `a.read` of the receive buffer, or slot `a.local_read` of the local buffer if the
       preceding chunk is on the same stage, or the batch if both are -1 (the first virtual stage).
       Its output is written to slot `a.write` of the send buffer or `a.local_write` of the local
       buffer; the last virtual stage writes neither. Its residuals are written to slot
       `residual_write`.
    3. Backward of `backward.chunk` and `backward.microbatch`, whole, or only the input gradient if
       `pending_write` is not -1. It reads the residuals in slot `residual_read` and the gradient in
       slot `g.read` or `g.local_read` (both -1: the loss). Its result is written to `g.write` or
       `g.local_write`. A split backward leaves the operands of its weight gradient in slot
       `pending_write`.
    4. Weight gradient of `weight.chunk` and `weight.microbatch`, from slots `pending_read` and
       `weight_residual_read`.

    In training runs with forwards, idle forwards have a `residual_write` too: a slot that no live
    value uses in that tick, so that a masked forward can store its garbage there. In all other
    tables, -1 means idle.

    Attributes:
        name: The schedule's class name.
        num_stages: Number of pipeline stages.
        num_microbatches: Microbatches in a batch.
        num_chunks: Chunks per stage.
        num_ticks: Length of the program.
        training: Whether the program has backwards.
        placement: The placement of the chunks.
        tables: The tables.
        stage_depth: The number of slots of each buffer that each stage needs.
        depth: The number of slots that every device allocates: the maximum over the stages.
        unbuffered: Whether no value has to be kept in a buffer: values that arrive are used in the
            same tick (`recv`), values that are sent were computed in the previous tick (`send`),
            and split backwards are completed in the same tick (`pending`). A `recv` or `pending`
            buffer that is never used counts as unbuffered; a `send` buffer that is never used does
            not.
        needs_spill: Whether some idle forward has no free slot for residuals. It then writes to
            slot `depth.residuals`, one more than the live values need.
        delays_loss: Whether each loss runs one tick after the forward that computes its input.
        runs: The ticks grouped into runs of equal content. There are at most `MAX_RUNS`, for any
            number of microbatches, plus two if the first and the last tick are separate runs.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_ticks: int
    training: bool
    placement: Placement
    tables: Tables[Table]
    stage_depth: Buffers[Row]
    depth: Buffers[int]
    unbuffered: Buffers[bool]
    needs_spill: bool
    delays_loss: bool
    runs: tuple[TickRun, ...]

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of microbatches in flight on a stage.

        Args:
            stage: The stage.

        Returns:
            Number of microbatches, counted on each chunk; 0 if the program has no backwards.
        """
        return self.stage_depth.residuals[stage]

    @property
    def peak_in_flight(self) -> int:
        """The largest `in_flight` of all stages."""
        return self.depth.residuals

    @property
    def residual_slots(self) -> int:
        """Slots of the residual buffer, including the spill slot if there is one."""
        return self.depth.residuals + int(self.needs_spill)

    @property
    def fuses_loss(self) -> bool:
        """Whether every loss is followed by its backward in the same tick.

        If so, the loss's gradient needs no buffer.
        """
        last_stage, last_chunk = self.placement.locations[-1]
        losses = self.tables.loss_microbatch[0]
        backward = self.tables.backward
        ticks = zip(
            losses, backward.microbatch[last_stage], backward.chunk[last_stage], strict=True
        )
        return all(loss == microbatch for loss, microbatch, chunk in ticks if chunk == last_chunk)

    @property
    def ends_at_input(self) -> bool:
        """Whether the last tick has a backward of the first virtual stage."""
        stage, chunk = self.placement.locations[0]
        return self.tables.backward.chunk[stage][-1] == chunk

    @property
    def has_split_backward(self) -> bool:
        """Whether some backward is split."""
        return self.depth.pending > 0
