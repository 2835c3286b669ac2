"""The tick program: a schedule as tables of whole numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

Table = tuple[tuple[int, ...], ...]
"""`table[stage][tick]`; -1 means that nothing happens."""


@dataclass(frozen=True)
class TickRun:
    """Successive ticks whose computing has the same content, counted over all stages.

    Attributes:
        start: First tick.
        stop: Tick behind the last.
        has_forward: Some stage runs a forward in some tick of the run.
        has_backward: Some stage runs a backward, whole or its input half.
        has_weight: Some stage runs the weight half of a backward.
        act_hops: Directions in which activations travel: 1 to the next stage of the ring, -1 to the previous one.
        grad_hops: Directions in which gradients travel.
    """

    start: int
    stop: int
    has_forward: bool
    has_backward: bool
    has_weight: bool
    act_hops: tuple[int, ...]
    grad_hops: tuple[int, ...]

    @property
    def has_act(self) -> bool:
        """Whether an activation travels in the run."""
        return bool(self.act_hops)

    @property
    def has_grad(self) -> bool:
        """Whether a gradient travels in the run."""
        return bool(self.grad_hops)


@dataclass(frozen=True)
class TickProgram:
    """What every stage does in every tick, and in which slot each value lies.

    A tick is a step of the schedule. It has four phases, in this order:

    1. exchange: `act_out[act_send]` goes to stage `act_send_to`, where it lands in `act_in[act_recv]`; gradients
       likewise, from `grad_out[grad_send]` to `grad_in[grad_recv]`;
    2. forward: of chunk `forward_chunk`, microbatch `forward_microbatch` (-1: idle). Its input is
       `act_in[forward_read]`, or `act_local[forward_local_read]` if the chunk before lies on the same stage, or the
       batch if both are -1 (the first part of the model). Its output goes to `act_out[forward_write]` or
       `act_local[forward_local_write]`, or nowhere (the last part); what the backward needs goes to
       `residual[residual_write]`;
    3. backward, whole or (where `pending_write` is not -1) its input half: of `backward_chunk`,
       `backward_microbatch`, from `residual[residual_read]` and the gradient `grad_in[backward_read]` or
       `grad_local[backward_local_read]` (both -1: the loss). Its result goes to `grad_out[backward_write]` or
       `grad_local[backward_local_write]`; a split one leaves the rest of its work in `pending[pending_write]`;
    4. weight: the other half, of `weight_chunk`, `weight_microbatch`, from `pending[pending_read]` and
       `residual[weight_residual_read]`.

    Idle forward cells of training runs that hold forwards have a `residual_write` too: a slot that nothing living
    uses in that tick, so that a masked forward may store its garbage there. Everywhere else -1 marks idleness.

    Attributes:
        name: The schedule's class name.
        num_stages: Pipeline stages.
        num_microbatches: Microbatches in a batch.
        num_chunks: Chunks a stage.
        num_ticks: Length of the program.
        training: Whether it has backwards.
        placement: `placement[stage][chunk]`: the chunk's place in the model, counted from the input.
        tables: Name to table: those above, and `act_send_to`, `act_recv_from`, `grad_send_to`, `grad_recv_from`
            (stages).
        stage_depth: Buffer (`act_in`, `act_out`, `act_local`, `grad_in`, `grad_out`, `grad_local`, `residual`,
            `pending`) to the slots each stage needs.
        depth: Buffer to the slots every device must hold: the maximum over stages.
        direct: Those of `act_in`, `grad_in`, `pending` whose values are all consumed in the tick they arrive, and so
            need no buffer. A buffer that is never used is among them.
        needs_spill: Whether some idle forward finds no free residual slot; it writes to slot `depth["residual"]`, one
            more than the living need.
        runs: The ticks in runs of equal content, at most `MAX_RUNS`, however many microbatches there are.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    num_ticks: int
    training: bool
    placement: tuple[tuple[int, ...], ...]
    tables: Mapping[str, Table]
    stage_depth: Mapping[str, tuple[int, ...]]
    depth: Mapping[str, int]
    direct: frozenset[str]
    needs_spill: bool
    runs: tuple[TickRun, ...]

    def in_flight(self, stage: int) -> int:
        """Give the most microbatches whose residuals live on a stage at once.

        Args:
            stage: The stage.

        Returns:
            Number of microbatches, counted on each chunk; 0 if the program has no backwards.
        """
        return self.stage_depth["residual"][stage]

    @property
    def peak_in_flight(self) -> int:
        """The largest `in_flight` of all stages."""
        return self.depth["residual"]

    @property
    def residual_slots(self) -> int:
        """Slots of the residual ring with the spill slot, if there is one."""
        return self.depth["residual"] + int(self.needs_spill)

    @property
    def has_split_backward(self) -> bool:
        """Whether some backward is run in two halves."""
        return self.depth["pending"] > 0
