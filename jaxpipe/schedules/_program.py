"""The tick program: a schedule as tables of whole numbers."""

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
"""Pairs `(source stage, target stage)`, by how many stages further on the ring the target lies."""


class Actions(NamedTuple, Generic[T]):
    """Actions of one kind: forward, backward or weight gradient.

    Attributes:
        microbatch: The microbatch; -1 where the stage is idle.
        chunk: The stage's chunk; -1 likewise.
    """

    microbatch: T
    chunk: T


class Transfers(NamedTuple, Generic[T]):
    """Way of one kind of value from the action that computes it to the one that takes it.

    The kinds are activations and gradients.

    Attributes:
        send: Slot of the send buffer that is sent in a tick's exchange.
        send_to: The stage that it goes to.
        recv: Slot of the receive buffer where the value lands that arrives in a tick's exchange.
        recv_from: The stage that it comes from.
        next_recv_from: `recv_from` of the tick after.
        read: Slot of the receive buffer that the tick's action takes.
        write: Slot of the send buffer that its result goes to.
        local_read: Slot of the local buffer that the action takes, if the chunk before lies on the
            same stage.
        local_write: Slot of the local buffer that its result goes to, if the chunk after lies on
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

    `Tables[Table]` is the whole program; the executor cuts one device's `Tables[jax.Array]` of one
    tick out of it.

    Attributes:
        forward: What forwards work on.
        backward: What backwards work on, whole ones and those of the input alone.
        weight: What the weight gradients of split backwards work on.
        activations: How activations travel; forwards take and give them.
        gradients: How gradients travel; backwards take and give them.
        residual_write: Slot for the residuals of the tick's forward.
        residual_read: Slot of the residuals that its backward takes.
        weight_residual_read: Slot of the residuals that its weight gradient takes.
        pending_write: Slot for what a split backward leaves for its weight gradient; -1 where the
            backward is whole.
        pending_read: Slot of what the weight gradient takes.
        input_microbatch: The microbatch whose forward on the model's first part is in this tick,
            told to all stages.
        next_input_microbatch: The same of the tick after.
        loss_microbatch: The microbatch whose loss is in this tick, told to all stages: that of the
            forward on the last part, or where losses are delayed of the forward a tick before.
        loss_gradient_write: On the stage of the last part the slot of that forward's residuals.
        last_input_grad_microbatch: The microbatch whose backward on the first part was in the tick
            before, told to all stages.
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
    """Something for each buffer of one kind of value that travels.

    Attributes:
        recv: Of what has arrived and waits for its action.
        send: Of what was computed and waits to be sent.
        local: Of what passes between two chunks of one stage.
    """

    recv: T
    send: T
    local: T


class Buffers(NamedTuple, Generic[T]):
    """Something for each buffer of a stage.

    Attributes:
        activations: Of activations.
        gradients: Of gradients.
        residuals: Of residuals, from a forward to its backward.
        pending: Of what a split backward hands from its input gradient to its weight gradient.
    """

    activations: TransferBuffers[T]
    gradients: TransferBuffers[T]
    residuals: T
    pending: T


_STRUCTURES: tuple[Callable[..., Any], ...] = (Tables, Transfers, Actions, Buffers, TransferBuffers)


def map_fields(function: Callable[..., Any], *structures: Any) -> Any:
    """Call a function with corresponding fields of structures; the results have their form.

    The structures are those of this module.
    """
    make: Callable[..., Any] = type(structures[0])  # pyright: ignore[reportUnknownVariableType]
    if make in _STRUCTURES:
        return make(*(map_fields(function, *each) for each in zip(*structures, strict=True)))
    return function(*structures)


class Idle(Enum):
    """What a device does in a tick in which it has no action of a kind.

    Each value as it is printed.
    """

    NEVER = "never idle"
    """No stage is idle in the run, so there is nothing to do."""

    COMPUTE = "computed"
    """Compute on whatever is there, and keep the result: it is zero, or nobody reads it."""

    MASK = "computed and dropped"
    """Compute on whatever is there; zeros replace the result."""

    BRANCH = "branched around"
    """One branch of a switch, which gives zeros."""

    LOOP = "looped"
    """No round of a loop that has one round where the action is not idle, and writes in place."""


@dataclass(frozen=True)
class ActionPlan:
    """How the actions of one kind run in a run of ticks.

    Attributes:
        idle: What a stage does without an action of this kind.
        chunks: Chunks that the actions are of, on any stage.
        splits: Of backwards whether they are whole (False) or of the input alone (True), in this
            order where both occur; empty for other kinds.
        branches_on_chunk: Several chunks are branches of one switch; otherwise the tick's chunk is
            an index into the weights of all.
        adds_in_loops: Gradients are added to the sums of their chunk in a loop of one round or none
            for each chunk.
    """

    idle: Idle
    chunks: tuple[int, ...]
    splits: tuple[bool, ...] = ()
    branches_on_chunk: bool = True
    adds_in_loops: bool = False

    @property
    def has_branches(self) -> bool:
        """True if the action is one of several branches of a switch."""
        is_one_of_many = len(self.splits) > 1 or (self.branches_on_chunk and len(self.chunks) > 1)
        return is_one_of_many or self.idle is Idle.BRANCH


@dataclass(frozen=True)
class TickRun:
    """Successive ticks whose computing has the same content, counted over all stages.

    Attributes:
        start: First tick.
        stop: Tick behind the last.
        activation_sends: Who sends activations to whom in the exchanges of these ticks.
        next_activation_sends: The same of the ticks `start + 1` to `stop`: what this run's own
            forwards hand on where nothing waits to be sent.
        gradient_sends: Who sends gradients to whom.
        has_one_chunk: Forward and backward of each tick, where a stage has both, are of one chunk.
        forward: How forwards run; None: no stage has one in these ticks. Likewise of what follows.
        backward: Backwards, whole or of the input alone.
        weight: Weight gradients of split backwards.
        loss: What stages do in ticks without a loss, or without a part in it.
        first: What they do, where all stages run the model's first layers, in ticks that need none
            of these: in training for the forward of the tick after.
        first_backward: What they do in ticks without a backward of these layers.
        receives_first: The exchanges of a tick end before its forward begins.
    """

    start: int
    stop: int
    activation_sends: Sends
    next_activation_sends: Sends
    gradient_sends: Sends
    has_one_chunk: bool
    forward: ActionPlan | None
    backward: ActionPlan | None
    weight: ActionPlan | None
    loss: Idle | None = None
    first: Idle | None = None
    first_backward: Idle | None = None
    receives_first: bool = False

    @property
    def has_forward(self) -> bool:
        """True if some stage runs a forward."""
        return self.forward is not None

    @property
    def has_backward(self) -> bool:
        """True if some stage runs a backward, whole or of the input alone."""
        return self.backward is not None

    @property
    def has_weight(self) -> bool:
        """True if some stage runs the weight gradient of a split backward."""
        return self.weight is not None


@dataclass(frozen=True)
class TickProgram:
    """Actions of every stage in every tick, and the slot of each value.

    A tick is a step of the schedule. It has four phases, in this order (`a` stands for
    `tables.activations`, `g` for `tables.gradients`):

    1. exchange: slot `a.send` of the activations' send buffer goes to stage `a.send_to`, where it
       lands in slot `a.recv` of the receive buffer; gradients likewise, by `g`;
    2. forward: of chunk `forward.chunk`, microbatch `forward.microbatch` (-1: idle). Its input is
       slot `a.read` of the receive buffer, or slot `a.local_read` of the local one if the chunk
       before lies on the same stage, or the batch if both are -1 (the first part of the model). Its
       output goes to slot `a.write` of the send buffer or `a.local_write` of the local one, or
       nowhere (the last part); its residuals go to slot `residual_write`;
    3. backward, whole or (where `pending_write` is not -1) of the input alone: of `backward.chunk`
       and `backward.microbatch`, from the residuals in slot `residual_read` and the gradient in
       slot `g.read` or `g.local_read` (both -1: the loss). Its result goes to `g.write` or
       `g.local_write`; a split one leaves the rest of its work in slot `pending_write`;
    4. weight: the rest, of `weight.chunk` and `weight.microbatch`, from slots `pending_read` and
       `weight_residual_read`.

    Idle forwards of training runs that hold forwards have a `residual_write` too: a slot that
    nothing living uses in that tick, so that a masked forward may store its garbage there.
    Everywhere else -1 marks idleness.

    Attributes:
        name: The schedule's class name.
        num_stages: Pipeline stages.
        num_microbatches: Microbatches in a batch.
        num_chunks: Chunks a stage.
        num_ticks: Length of the program.
        training: Whether it has backwards.
        placement: Where the chunks lie.
        tables: The tables.
        stage_depth: The slots of each buffer that each stage needs.
        depth: The slots that every device must hold: the maximum over stages.
        unbuffered: Whether no value waits in a buffer: what arrives is taken in the same tick
            (`recv`), what is sent was computed in the tick before (`send`), a split backward is
            completed in the same tick (`pending`). A `recv` or `pending` that is never used counts
            as such, a `send` that is never used does not.
        needs_spill: Whether some idle forward finds no free slot for residuals; it writes to slot
            `depth.residuals`, one more than the living need.
        delays_loss: Whether each loss runs a tick after the forward whose output it takes.
        runs: The ticks in runs of equal content, at most `MAX_RUNS`, however many microbatches
            there are; two more where the first tick and the last are runs of their own.
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
        """Give the most microbatches whose residuals live on a stage at once.

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
        """Slots of the residuals' buffer with the spill slot, if there is one."""
        return self.depth.residuals + int(self.needs_spill)

    @property
    def fuses_loss(self) -> bool:
        """True if every loss is followed by its backward in the same tick.

        Its gradient need not wait then.
        """
        last_stage, last_chunk = self.placement.locations[-1]
        losses, backward = self.tables.loss_microbatch[0], self.tables.backward
        ticks = zip(
            losses, backward.microbatch[last_stage], backward.chunk[last_stage], strict=True
        )
        return all(loss == microbatch for loss, microbatch, chunk in ticks if chunk == last_chunk)

    @property
    def ends_at_input(self) -> bool:
        """True if the last tick has a backward of the model's first part."""
        stage, chunk = self.placement.locations[0]
        return self.tables.backward.chunk[stage][-1] == chunk

    @property
    def has_split_backward(self) -> bool:
        """True if some backward is split in two."""
        return self.depth.pending > 0
