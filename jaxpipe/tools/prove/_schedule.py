"""The tick program run on symbolic values: every action must read exactly the value it should."""

from collections.abc import Callable
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Buffers,
    Sends,
    Table,
    TickProgram,
    TransferBuffers,
    Transfers,
    map_fields,
)

Ring = list[Any]


class SymbolicRun:
    """Runs a tick program with buffers of exactly the stated depth, on names instead of arrays.

    `run` raises ScheduleError, with the stage and the tick, at the first read of a wrong value and
    the first exchange that one side does not take part in, and if an action does not run once.
    """

    def __init__(self, program: TickProgram) -> None:
        self.program = program
        self.tables = program.tables
        self.last = program.num_stages * program.num_chunks - 1
        # With the spill slot, to which idle forwards write residuals that nothing reads.
        depth = program.depth._replace(residuals=program.residual_slots)
        self.buffers: list[Buffers[Ring]] = [
            map_fields(lambda size: [None] * size, depth) for _ in range(program.num_stages)
        ]
        self.done: dict[tuple[str, int, int], int] = {}
        self.tick = 0
        self.stage = 0

    def _require(self, holds: bool, rule: str, got: Any = None) -> None:
        if not holds:
            found = "" if got is None else f", but got {got}"
            raise ScheduleError(
                f"in the tick program of {self.program.name}, {rule}{found} "
                f"(stage={self.stage}, tick={self.tick})."
            )

    def at(self, table: Table) -> int:
        return table[self.stage][self.tick]

    def read(self, ring: Ring, slots: Table) -> Any:
        slot = self.at(slots)
        self._require(slot >= 0, "a value that an action needs must be in a slot")
        self._require(ring[slot] is not None, "a value must be written before it is read", slot)
        return ring[slot]

    def write(self, ring: Ring, slots: Table, value: Any) -> None:
        slot = self.at(slots)
        if slot >= 0:
            ring[slot] = value

    def once(self, kind: str, part: int, microbatch: int) -> None:
        key = (kind, part, microbatch)
        self._require(key not in self.done, "each action must run once", key)
        self.done[key] = self.tick

    def run(self) -> None:
        program = self.program
        ends = [0, *(run.stop for run in program.runs)]
        self._require(
            [run.start for run in program.runs] == ends[:-1] and ends[-1] == program.num_ticks,
            "runs of ticks must follow one another and cover all ticks",
            [(run.start, run.stop) for run in program.runs],
        )
        for run in program.runs:
            # `self.tick` and `self.stage` are counted here so that each refusal can name them.
            for self.tick in range(run.start, run.stop):
                # Values arrive before the actions of their tick, some of which use them at once.
                self.exchange(
                    self.tables.activations,
                    lambda buffers: buffers.activations,
                    run.activation_sends,
                )
                self.exchange(
                    self.tables.gradients, lambda buffers: buffers.gradients, run.gradient_sends
                )
                for self.stage in range(program.num_stages):
                    self.forward(allowed=run.has_forward)
                    self.backward(allowed=run.has_backward)
                    self.weight(allowed=run.has_weight)
        kinds = ("F", "B", "W") if program.training else ("F",)
        parts = range(self.last + 1)
        microbatches = range(program.num_microbatches)
        wanted = {(kind, part, m) for kind in kinds for part in parts for m in microbatches}
        missing = sorted(wanted ^ set(self.done))
        self._require(
            not missing,
            "every microbatch must run each action once on each virtual stage",
            f"(kind, virtual stage, microbatch) = {missing[:1]}",
        )

    def exchange(
        self,
        transfers: Transfers[Table],
        buffers_of: Callable[[Buffers[Ring]], TransferBuffers[Ring]],
        sends: Sends,
    ) -> None:
        landing: dict[int, Any] = {}
        stages = self.program.num_stages
        for self.stage in range(stages):
            target = self.at(transfers.send_to)
            self._require(
                (target >= 0) == (self.at(transfers.send) >= 0),
                "a send must have a slot and a target",
            )
            if target >= 0:
                distance = (target - self.stage) % stages
                self._require(
                    (self.stage, target) in sends.get(distance, ()),
                    "the exchanges of a run of ticks must contain each send",
                    f"a send to stage {target}",
                )
                self._require(
                    target not in landing,
                    "a stage must receive one value of a kind in a tick",
                    f"two for stage {target}",
                )
                landing[target] = (
                    self.stage,
                    self.read(buffers_of(self.buffers[self.stage]).send, transfers.send),
                )
        for self.stage in range(stages):
            source = self.at(transfers.recv_from)
            self._require(
                (source >= 0) == (self.stage in landing) == (self.at(transfers.recv) >= 0),
                "each value that is sent must be received, and nothing else",
                f"recv_from={source}, sent by {landing.get(self.stage, (None,))[0]}",
            )
            if source >= 0:
                sender, sent = landing[self.stage]
                self._require(sender == source, "a value must come from its sender", source)
                self.write(
                    buffers_of(self.buffers[self.stage]).recv, transfers.recv, (*sent, self.tick)
                )

    def take(
        self, transfers: Transfers[Table], rings: TransferBuffers[Ring], *, unbuffered: bool
    ) -> Any:
        """The value that an action reads, or None."""
        received = self.at(transfers.read)
        local = self.at(transfers.local_read)
        self._require(received < 0 or local < 0, "an action must read one value")
        if received >= 0:
            # `exchange` adds the tick of arrival to what is received.
            *named, arrived = self.read(rings.recv, transfers.read)
            self._require(
                not unbuffered or arrived == self.tick,
                "an unbuffered value must be used in the tick in which it arrives",
                named,
            )
            return tuple(named)
        return self.read(rings.local, transfers.local_read) if local >= 0 else None

    def forward(self, *, allowed: bool) -> None:
        tables = self.tables
        buffers = self.buffers[self.stage]
        transfers = self.tables.activations
        microbatch = self.at(tables.forward.microbatch)
        if microbatch < 0:
            is_written = self.at(tables.residual_write) >= 0
            self._require(
                is_written == (allowed and self.program.training),
                "an idle forward must write its residuals to the slot that nothing reads",
            )
            # These residuals belong to no microbatch. `read` refuses None.
            self.write(buffers.residuals, tables.residual_write, None)
            self._require(
                self.at(transfers.write) == self.at(transfers.local_write) == -1,
                "an idle forward must pass nothing on",
            )
            return
        self._require(allowed, "a run of ticks must contain the kinds of its actions", "a forward")
        part = self.program.placement.virtual[self.stage][self.at(tables.forward.chunk)]
        taken = self.take(
            transfers, buffers.activations, unbuffered=self.program.unbuffered.activations.recv
        )
        wanted = None if part == 0 else ("act", part - 1, microbatch)
        self._require(taken == wanted, f"a forward must read {wanted}, the output before it", taken)
        if part == 0:
            announced = [self.at(tables.input_microbatch)]
            if self.tick:
                announced.append(tables.next_input_microbatch[self.stage][self.tick - 1])
            self._require(
                set(announced) == {microbatch},
                f"microbatch {microbatch} must be announced as the one that enters",
                announced,
            )
        if part == self.last:
            # With delayed losses, the loss runs in the tick after its forward.
            at = self.tick + self.program.delays_loss
            lost = [row[at] for row in tables.loss_microbatch]
            self._require(
                set(lost) == {microbatch}, f"the loss must be that of microbatch {microbatch}", lost
            )
            slot = tables.loss_gradient_write[self.stage][at]
            self._require(
                not self.program.training or slot == self.at(tables.residual_write),
                "the loss's gradient must go to the slot of its forward's residuals",
                slot,
            )
        writes = [self.at(transfers.write) >= 0, self.at(transfers.local_write) >= 0]
        self._require(
            sum(writes) == (part < self.last), "a forward must pass its output on once", writes
        )
        self.write(buffers.activations.send, transfers.write, ("act", part, microbatch))
        self.write(buffers.activations.local, transfers.local_write, ("act", part, microbatch))
        self.write(buffers.residuals, tables.residual_write, ("residual", part, microbatch))
        self.once("F", part, microbatch)

    def backward(self, *, allowed: bool) -> None:
        tables = self.tables
        buffers = self.buffers[self.stage]
        transfers = self.tables.gradients
        microbatch = self.at(tables.backward.microbatch)
        if microbatch < 0:
            slots = (transfers.write, transfers.local_write, tables.pending_write)
            self._require(
                all(self.at(each) == -1 for each in slots), "an idle backward must write nothing"
            )
            return
        self._require(allowed, "a run of ticks must contain the kinds of its actions", "a backward")
        part = self.program.placement.virtual[self.stage][self.at(tables.backward.chunk)]
        taken = self.take(
            transfers, buffers.gradients, unbuffered=self.program.unbuffered.gradients.recv
        )
        if part == self.last:
            self._require(
                microbatch in tables.loss_microbatch[self.stage][: self.tick + 1],
                f"the loss of microbatch {microbatch} must come before its backward",
            )
        if part == 0 and self.tick + 1 < self.program.num_ticks:
            announced = [row[self.tick + 1] for row in tables.last_input_grad_microbatch]
            self._require(
                set(announced) == {microbatch},
                f"microbatch {microbatch} must be announced as the one that leaves",
                announced,
            )
        wanted = None if part == self.last else ("grad", part + 1, microbatch)
        self._require(
            taken == wanted, f"a backward must read {wanted}, the gradient after it", taken
        )
        self._residuals(buffers, tables.residual_read, part, microbatch)
        writes = [self.at(transfers.write) >= 0, self.at(transfers.local_write) >= 0]
        self._require(
            sum(writes) == (part > 0), "a backward must pass its gradient on once", writes
        )
        self.write(buffers.gradients.send, transfers.write, ("grad", part, microbatch))
        self.write(buffers.gradients.local, transfers.local_write, ("grad", part, microbatch))
        self.write(buffers.pending, tables.pending_write, ("pending", part, microbatch, self.tick))
        self.once("B", part, microbatch)
        # A backward that leaves no operands is whole, and contains the weight gradient.
        if self.at(tables.pending_write) < 0:
            self.once("W", part, microbatch)

    def weight(self, *, allowed: bool) -> None:
        tables = self.tables
        buffers = self.buffers[self.stage]
        microbatch = self.at(tables.weight.microbatch)
        if microbatch < 0:
            return
        self._require(
            allowed, "a run of ticks must contain the kinds of its actions", "a weight gradient"
        )
        part = self.program.placement.virtual[self.stage][self.at(tables.weight.chunk)]
        *pending, since = self.read(buffers.pending, tables.pending_read)
        wanted = ("pending", part, microbatch)
        self._require(
            tuple(pending) == wanted, f"a weight gradient must read {wanted}", tuple(pending)
        )
        self._require(
            not self.program.unbuffered.pending or since == self.tick,
            "unbuffered operands must be used in the tick that makes them",
        )
        self._residuals(buffers, tables.weight_residual_read, part, microbatch)
        self.once("W", part, microbatch)

    def _residuals(self, buffers: Buffers[Ring], slots: Table, part: int, microbatch: int) -> None:
        found = self.read(buffers.residuals, slots)
        wanted = ("residual", part, microbatch)
        self._require(found == wanted, f"an action must read {wanted}, its residuals", found)


def require_in_flight(program: TickProgram) -> None:
    """Raise ScheduleError unless as many microbatches are in flight as the program states."""
    tables = program.tables
    for stage in range(program.num_stages):
        alive: set[tuple[int, int]] = set()
        peak = 0
        for tick in range(program.num_ticks):
            forward, backward, weight = (
                (actions.chunk[stage][tick], actions.microbatch[stage][tick])
                for actions in (tables.forward, tables.backward, tables.weight)
            )
            # The forward of a tick writes before the backward of the same tick frees its slot.
            if forward[1] >= 0:
                alive.add(forward)
            peak = max(peak, len(alive))
            if backward[1] >= 0 and tables.pending_write[stage][tick] < 0:
                alive.discard(backward)
            if weight[1] >= 0:
                alive.discard(weight)
        if program.in_flight(stage) != peak:
            raise ScheduleError(
                f"in the tick program of {program.name}, stage {stage} must hold the stated "
                f"{program.in_flight(stage)} microbatches, but got {peak}."
            )
    most = max(map(program.in_flight, range(program.num_stages)))
    if program.peak_in_flight != most:
        raise ScheduleError(
            f"the tick program of {program.name} must state the most microbatches of any stage, "
            f"{most}, but got {program.peak_in_flight}."
        )
