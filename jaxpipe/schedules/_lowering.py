"""From a sound schedule to its tick program."""

import dataclasses
from collections.abc import Sequence

from ._check import CheckedSchedule, checked_schedule
from ._events import IDLE, StageActions
from ._placement import ChunkLocation, Placement
from ._program import (
    Actions,
    Buffers,
    Row,
    Table,
    Tables,
    TickProgram,
    TransferBuffers,
    Transfers,
    map_fields,
)
from ._runs import tick_runs
from ._slots import Slots, assign_slots
from ._stages import AnySchedule


def lower_schedule(
    schedule: AnySchedule,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    *,
    training: bool = True,
    delays_loss: bool = False,
) -> TickProgram:
    """Check a schedule and convert it to a tick program.

    Each value gets the lowest slot that is free during its lifetime, so each buffer is exactly as
    deep as the maximum number of values alive at the same time. A received value lives from its
    receive to its use, and a sent value from its computation to its send. Residuals live from the
    forward to the end of the backward (the weight gradient, if the backward is split).

    Args:
        schedule: A name, a schedule class, the object of one stage, or the objects of all stages in
            order.
        num_microbatches: Microbatches in a batch. Required with a name or class.
        num_stages: Pipeline stages. Required with a name or class.
        training: False for a forward-only schedule.
        delays_loss: Run each loss one tick after the forward that computes its input, and all
            backwards one tick later. This adds one tick in total. The exchanges of the loss with
            other stages then overlap the forward of that tick.

    Returns:
        The program.

    Raises:
        ScheduleError: The schedule is not sound.

    Example:
        >>> program = lower_schedule(OneFOneBSchedule, num_microbatches=8, num_stages=4)
        >>> program.num_ticks, program.depth.residuals
        (14, 7)
    """
    checked = checked_schedule(schedule, num_microbatches, num_stages, training=training)
    if delays_loss:
        checked = dataclasses.replace(
            checked, stages=tuple(map(_with_later_backwards, checked.stages))
        )
    one = checked.schedules[0]
    stages = [_StageTables(checked, stage) for stage in range(one.stages)]
    tables: Tables[Table] = map_fields(lambda *rows: rows, *(stage.tables for stage in stages))
    tables = _with_model_ends(tables, checked.placement, delays_loss=delays_loss)
    slots = [stage.slots for stage in stages]
    stage_depth: Buffers[Row] = map_fields(lambda *each: tuple(one.depth for one in each), *slots)
    # All devices run one program, so each buffer is as deep as the stage that needs the most.
    depth: Buffers[int] = map_fields(max, stage_depth)
    runs = tick_runs(checked.stages[0].num_steps, tables)
    # This needs the runs: a masked forward computes only in ticks of runs that have forwards.
    if training:
        forward_ticks = [run.has_forward for run in runs for _ in range(run.start, run.stop)]
        rows = zip(tables.residual_write, slots, strict=True)
        vacant = tuple(
            _with_vacant(row, each.residuals.vacant, forward_ticks) for row, each in rows
        )
        tables = tables._replace(residual_write=vacant)
    return TickProgram(
        name=type(one).__name__,
        num_stages=one.stages,
        num_microbatches=one.micro_batches,
        num_chunks=one.num_chunks,
        num_ticks=checked.stages[0].num_steps,
        training=training,
        placement=checked.placement,
        tables=tables,
        stage_depth=stage_depth,
        depth=depth,
        unbuffered=_unbuffered(tables),
        needs_spill=any(slot == depth.residuals for row in tables.residual_write for slot in row),
        delays_loss=delays_loss,
        runs=runs,
    )


class _StageTables:
    """The rows of one stage and the slots of its buffers."""

    def __init__(self, checked: CheckedSchedule, stage: int) -> None:
        self._microbatches = checked.schedules[0].micro_batches
        chunks = range(checked.placement.num_chunks)
        self._num_units = len(chunks) * self._microbatches
        before = [checked.placement.before(stage, chunk) for chunk in chunks]
        after = [checked.placement.after(stage, chunk) for chunk in chunks]
        rows = checked.stages[stage].rows
        forward = rows["forward"]
        backward = rows["backward"]
        weight = rows["weight"]
        received = rows["act_recv"]
        sent = rows["act_send"]
        activations, act_slots = self._transfers(stage, forward, received, sent, (before, after))
        received = rows["grad_recv"]
        sent = rows["grad_send"]
        gradients, grad_slots = self._transfers(stage, backward, received, sent, (after, before))
        # A backward is split if its unit has a weight gradient. A schedule may split only some of
        # its backwards.
        split = self._only(backward, self._units_of(weight))
        whole = [
            -1 if split_unit >= 0 else unit
            for unit, split_unit in zip(backward, split, strict=True)
        ]
        stored = forward if checked.training else [-1] * len(forward)
        # A split backward frees its residuals only after its weight gradient.
        residuals = assign_slots(self._num_units, stored, [whole, weight])
        pending = assign_slots(self._num_units, split, [weight])
        self.slots = Buffers(act_slots, grad_slots, residuals, pending)
        # Rows that are the same on all stages stay empty here: see `_with_model_ends`.
        self.tables: Tables[Row] = Tables(
            forward=self._actions(forward),
            backward=self._actions(backward),
            weight=self._actions(weight),
            activations=activations,
            gradients=gradients,
            residual_write=residuals.row(stored),
            residual_read=residuals.row(backward),
            weight_residual_read=residuals.row(weight),
            pending_write=pending.row(split),
            pending_read=pending.row(weight),
            input_microbatch=(),
            next_input_microbatch=(),
            loss_microbatch=(),
            loss_gradient_write=(),
            last_input_grad_microbatch=(),
        )

    def _actions(self, units: Sequence[int]) -> Actions[Row]:
        chunks = tuple([unit // self._microbatches if unit >= 0 else -1 for unit in units])
        return Actions(
            tuple([unit % self._microbatches if unit >= 0 else -1 for unit in units]), chunks
        )

    def _transfers(
        self,
        stage: int,
        computed: Sequence[int],
        received: Sequence[int],
        sent: Sequence[int],
        neighbours: tuple[Sequence[ChunkLocation | None], Sequence[ChunkLocation | None]],
    ) -> tuple[Transfers[Row], TransferBuffers[Slots]]:
        """Return the slots and partners of the inputs and outputs of one kind of action.

        The rows contain units. `neighbours` are the source and the target of each chunk's values.
        """
        # The ends of the model have no neighbour. The stage itself is a placeholder that no row
        # uses.
        sources, targets = (
            [stage if one is None else one[0] for one in each] for each in neighbours
        )
        to_local = [one[1] if one is not None and one[0] == stage else -1 for one in neighbours[1]]
        # Only values that are sent need a slot: the output of the last virtual stage and the
        # gradient of the first are not sent.
        outgoing = self._only(computed, self._units_of(sent))
        incoming = self._only(computed, self._units_of(received))
        # Between two chunks of one stage, a value keeps its microbatch but changes its chunk, and
        # thus its unit.
        handed = [self._handed(unit, to_local) for unit in computed]
        taken = self._only(computed, self._units_of(handed))
        slots = TransferBuffers(
            recv=assign_slots(self._num_units, received, [incoming]),
            # The exchange is the first phase of a tick, so a sent value has left its slot before
            # the next value is written.
            send=assign_slots(self._num_units, outgoing, [sent], frees_first=True),
            local=assign_slots(self._num_units, handed, [taken]),
        )
        recv_from = self._stages_of(received, sources)
        tables = Transfers(
            send=slots.send.row(sent),
            send_to=self._stages_of(sent, targets),
            recv=slots.recv.row(received),
            recv_from=recv_from,
            # For values that are sent at the end of the tick that computes them: they arrive in the
            # exchange of the next tick.
            next_recv_from=(*recv_from[1:], -1),
            read=slots.recv.row(incoming),
            write=slots.send.row(outgoing),
            local_read=slots.local.row(taken),
            local_write=slots.local.row(handed),
        )
        return tables, slots

    def _stages_of(self, units: Sequence[int], stages: Sequence[int]) -> Row:
        return tuple([stages[unit // self._microbatches] if unit >= 0 else -1 for unit in units])

    def _handed(self, unit: int, to_local: list[int]) -> int:
        """Return the unit, on another chunk of this stage, that uses a computed value, or -1."""
        if unit < 0:
            return -1
        chunk, microbatch = divmod(unit, self._microbatches)
        return -1 if to_local[chunk] < 0 else to_local[chunk] * self._microbatches + microbatch

    def _units_of(self, row: Sequence[int]) -> bytearray:
        """Mark the units of a row."""
        marks = bytearray(self._num_units + 1)
        for unit in row:
            marks[unit] = 1
        # Idle actions are -1, and so index the entry after the last unit.
        marks[-1] = 0
        return marks

    def _only(self, row: Sequence[int], marks: bytearray) -> list[int]:
        return [unit if marks[unit] else -1 for unit in row]


def _with_later_backwards(actions: StageActions) -> StageActions:
    """Return a stage's actions with every backward, and all that follows it, one tick later."""
    later = {"backward", "weight", "grad_recv", "grad_send"}
    rows = {
        name: [IDLE, *row] if name in later else [*row, IDLE] for name, row in actions.rows.items()
    }
    return dataclasses.replace(actions, rows=rows, num_steps=actions.num_steps + 1)


def _with_model_ends(
    tables: Tables[Table], placement: Placement, *, delays_loss: bool
) -> Tables[Table]:
    """Fill in the rows that tell all stages which microbatch is at the ends of the model."""

    def of_part(actions: Actions[Table], part: int) -> Row:
        stage, chunk = placement.locations[part]
        at = zip(actions.microbatch[stage], actions.chunk[stage], strict=True)
        return tuple([microbatch if found == chunk else -1 for microbatch, found in at])

    # All stages need the row, not only the one that runs the action: inputs and labels may be
    # sharded over the stages, which then gather them together. The same holds for
    # vocabulary-parallel layers.
    def told(row: Row) -> Table:
        return (row,) * placement.num_stages

    entering = of_part(tables.forward, 0)
    loss = of_part(tables.forward, -1)
    last_stage = placement.locations[-1][0]
    pairs = zip(tables.residual_write[last_stage], loss, strict=True)
    written = tuple([slot if microbatch >= 0 else -1 for slot, microbatch in pairs])
    none = (-1,) * len(loss)
    if delays_loss:
        loss = _a_tick_later(loss)
        written = _a_tick_later(written)
    return tables._replace(
        input_microbatch=told(entering),
        next_input_microbatch=told((*entering[1:], -1)),
        loss_microbatch=told(loss),
        loss_gradient_write=tuple(
            [written if stage == last_stage else none for stage in range(placement.num_stages)]
        ),
        last_input_grad_microbatch=told(_a_tick_later(of_part(tables.backward, 0))),
    )


def _a_tick_later(row: Row) -> Row:
    return (-1, *row[:-1])


def _unbuffered(tables: Tables[Table]) -> Buffers[bool]:
    def of(transfers: Transfers[Table]) -> TransferBuffers[bool]:
        # If values are always sent in the tick after they were computed, only one value is ever
        # waiting, and it needs no slot.
        made = _marks(transfers.write)
        sent = _marks(transfers.send)
        is_next_tick = all(
            [False, *one] == [*other, False] for one, other in zip(made, sent, strict=True)
        )
        return TransferBuffers(
            recv=transfers.read == transfers.recv,
            send=is_next_tick and any(map(any, sent)),
            local=False,
        )

    # If the tables are equal, each value is read from its slot in the tick that writes it.
    pending = tables.pending_write == tables.pending_read
    return Buffers(of(tables.activations), of(tables.gradients), residuals=False, pending=pending)


def _marks(table: Table) -> list[list[bool]]:
    return [[entry >= 0 for entry in row] for row in table]


def _with_vacant(row: Sequence[int], vacant: Sequence[int], wanted: Sequence[bool]) -> Row:
    return tuple(
        [
            free if want and slot < 0 else slot
            for slot, free, want in zip(row, vacant, wanted, strict=True)
        ]
    )
