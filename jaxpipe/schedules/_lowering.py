"""From a sound schedule to its tick program."""

from collections.abc import Sequence

from ._base import PipeSchedule
from ._check import CheckedSchedule, checked_schedule
from ._program import Table, TickProgram
from ._runs import tick_runs
from ._slots import Slots, assign_slots

BUFFERS = ("act_in", "act_out", "act_local", "grad_in", "grad_out", "grad_local", "residual", "pending")
DIRECT = ("act_in", "grad_in", "pending")


def lower_schedule(
    schedule: type[PipeSchedule] | Sequence[PipeSchedule],
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    *,
    training: bool = True,
    one_run: bool = False,
) -> TickProgram:
    """Check a schedule and turn it into a tick program.

    Slots go to values by lifetime, lowest first, so each ring is exactly as deep as the most values alive at once.
    `act_in` and `grad_in` are held from the receive to the use, `act_out` and `grad_out` from the computing to the
    send, a residual from the forward to the end of the backward (the weight half, if it is split).

    Args:
        schedule: A schedule class, or the objects of all stages in order.
        num_microbatches: Microbatches in a batch; needed with a class.
        num_stages: Pipeline stages; needed with a class.
        training: False for a schedule of forwards only.
        one_run: Whether all ticks form one run, which compiles fastest and costs nothing where idle cells are skipped.
            By default ticks of different content, which a device that computes idle cells should not mix, are kept
            apart.

    Returns:
        The program.

    Raises:
        ScheduleError: The schedule is not sound.

    Example:
        >>> program = lower_schedule(OneFOneBSchedule, num_microbatches=8, num_stages=4)
        >>> program.num_ticks, program.depth["residual"]
        (14, 7)
    """
    checked = checked_schedule(schedule, num_microbatches, num_stages, training=training)
    one = checked.schedules[0]
    stages = [_StageTables(checked, stage) for stage in range(one.stages)]
    tables = {name: tuple(stage.tables[name] for stage in stages) for name in stages[0].tables}
    stage_depth = {name: tuple(stage.slots[name].depth for stage in stages) for name in BUFFERS}
    depth = {name: max(depths) for name, depths in stage_depth.items()}
    num_ticks = checked.stages[0].num_steps
    hops = {
        "act": _hops(tables["act_send_to"], num_ticks, one.stages, first=1),
        "grad": _hops(tables["grad_send_to"], num_ticks, one.stages, first=-1),
    }
    runs = tick_runs(num_ticks, tables, hops, one_run=one_run)
    if training:
        forward_ticks = [run.has_forward for run in runs for _ in range(run.start, run.stop)]
        tables["residual_write"] = tuple(
            _with_vacant(row, stage.slots["residual"].vacant, forward_ticks)
            for row, stage in zip(tables["residual_write"], stages, strict=True)
        )
    return TickProgram(
        name=type(one).__name__,
        num_stages=one.stages,
        num_microbatches=one.micro_batches,
        num_chunks=one.num_chunks,
        num_ticks=num_ticks,
        training=training,
        placement=checked.placement.virtual,
        tables=tables,
        stage_depth=stage_depth,
        depth=depth,
        direct=frozenset(name for name in DIRECT if all(name in stage.direct for stage in stages)),
        needs_spill=any(slot == depth["residual"] for row in tables["residual_write"] for slot in row),
        runs=runs,
    )


class _StageTables:
    """The rows of one stage, its slots, and which buffers it does not need."""

    def __init__(self, checked: CheckedSchedule, stage: int) -> None:
        self._microbatches = checked.schedules[0].micro_batches
        self._rows = checked.stages[stage].rows
        self._training = checked.training
        chunks = range(checked.placement.num_chunks)
        self._num_units = len(chunks) * self._microbatches
        before = [checked.placement.before(stage, chunk) for chunk in chunks]
        after = [checked.placement.after(stage, chunk) for chunk in chunks]
        self._before_stage = [stage if place is None else place[0] for place in before]
        self._after_stage = [stage if place is None else place[0] for place in after]
        self._from_local = [place[1] if place is not None and place[0] == stage else -1 for place in before]
        self._to_local = [place[1] if place is not None and place[0] == stage else -1 for place in after]
        self.tables: dict[str, tuple[int, ...]] = {}
        self.slots: dict[str, Slots] = {}
        self.direct: set[str] = set()
        self._number_cells()
        self._move("act", "forward", self._to_local)
        self._move("grad", "backward", self._from_local)
        self._name_partners()
        self._keep()

    def _number_cells(self) -> None:
        microbatch_of = [*range(self._microbatches)] * len(self._to_local) + [-1]
        chunk_of = [chunk for chunk in range(len(self._to_local)) for _ in range(self._microbatches)] + [-1]
        for kind in ("forward", "backward", "weight"):
            row = self._rows[kind]
            self.tables[f"{kind}_microbatch"] = tuple([microbatch_of[unit] for unit in row])
            self.tables[f"{kind}_chunk"] = tuple([chunk_of[unit] for unit in row])

    def _move(self, value: str, kind: str, to_local: list[int]) -> None:
        """Slots of what a computing reads and writes: received, sent, or handed on within the stage."""
        computed, received, sent = self._rows[kind], self._rows[f"{value}_recv"], self._rows[f"{value}_send"]
        ships = self._units_of(sent)
        arrives = self._units_of(received)
        outgoing = self._only(computed, ships)
        incoming = self._only(computed, arrives)
        into = assign_slots(self._num_units, received, [incoming])
        out = assign_slots(self._num_units, outgoing, [sent], frees_first=True)
        handed = [self._handed(unit, to_local) for unit in computed]
        taken = self._only(computed, self._units_of(handed))
        local = assign_slots(self._num_units, handed, [taken])
        self.slots |= {f"{value}_in": into, f"{value}_out": out, f"{value}_local": local}
        self.tables |= {
            f"{value}_recv": into.row(received),
            f"{value}_send": out.row(sent),
            f"{kind}_read": into.row(incoming),
            f"{kind}_write": out.row(outgoing),
            f"{kind}_local_read": local.row(taken),
            f"{kind}_local_write": local.row(handed),
        }
        if incoming == received:
            self.direct.add(f"{value}_in")

    def _keep(self) -> None:
        """Slots of what lies between a forward and its backward, and between the halves of a split backward."""
        rows = self._rows
        halves = self._units_of(rows["weight"])
        split = self._only(rows["backward"], halves)
        whole = [-1 if half >= 0 else unit for unit, half in zip(rows["backward"], split, strict=True)]
        kept = rows["forward"] if self._training else [-1] * len(rows["forward"])
        residual = assign_slots(self._num_units, kept, [whole, rows["weight"]])
        pending = assign_slots(self._num_units, split, [rows["weight"]])
        self.slots |= {"residual": residual, "pending": pending}
        self.tables |= {
            "residual_write": residual.row(kept),
            "residual_read": residual.row(rows["backward"]),
            "weight_residual_read": residual.row(rows["weight"]),
            "pending_write": pending.row(split),
            "pending_read": pending.row(rows["weight"]),
        }
        if split == rows["weight"]:
            self.direct.add("pending")

    def _name_partners(self) -> None:
        partners = {
            "act_send_to": ("act_send", self._after_stage),
            "act_recv_from": ("act_recv", self._before_stage),
            "grad_send_to": ("grad_send", self._before_stage),
            "grad_recv_from": ("grad_recv", self._after_stage),
        }
        for name, (row, stages) in partners.items():
            partner_of = [partner for partner in stages for _ in range(self._microbatches)] + [-1]
            self.tables[name] = tuple([partner_of[unit] for unit in self._rows[row]])

    def _handed(self, unit: int, to_local: list[int]) -> int:
        """Give the unit, on another chunk of this stage, that a computed value is for; -1 if it goes elsewhere."""
        if unit < 0:
            return -1
        chunk, microbatch = divmod(unit, self._microbatches)
        return -1 if to_local[chunk] < 0 else to_local[chunk] * self._microbatches + microbatch

    def _units_of(self, row: Sequence[int]) -> bytearray:
        """Mark the units of a row; the entry behind the last unit, which idle cells index, stays 0."""
        marks = bytearray(self._num_units + 1)
        for unit in row:
            marks[unit] = 1
        marks[-1] = 0
        return marks

    def _only(self, row: Sequence[int], marks: bytearray) -> list[int]:
        return [unit if marks[unit] else -1 for unit in row]


def _hops(table: Table, num_ticks: int, num_stages: int, *, first: int) -> list[set[int]]:
    """Give the ring directions used in each tick; `first` wins where both lead to the same stage."""
    hops: list[set[int]] = [set() for _ in range(num_ticks)]
    for stage, row in enumerate(table):
        for tick, target in enumerate(row):
            if target >= 0:
                hops[tick].add(first if (target - stage - first) % num_stages == 0 else -first)
    return hops


def _with_vacant(row: Sequence[int], vacant: Sequence[int], wanted: Sequence[bool]) -> tuple[int, ...]:
    return tuple([free if want and slot < 0 else slot for slot, free, want in zip(row, vacant, wanted, strict=True)])
