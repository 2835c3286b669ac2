"""A machine that runs tick programs on symbolic values.

Every action must read exactly the value it should.
"""

from collections.abc import Callable
from typing import Any

from jaxpipe.schedules import Buffers, Sends, Table, TickProgram, TransferBuffers, Transfers
from jaxpipe.schedules._program import map_fields

Ring = list[Any]


class Machine:
    """Executes a program as its documentation says, with buffers of exactly the stated depth."""

    def __init__(self, program: TickProgram) -> None:
        self.program, self.tables = program, program.tables
        self.last = program.num_stages * program.num_chunks - 1
        depth = program.depth._replace(residuals=program.residual_slots)
        self.buffers: list[Buffers[Ring]] = [
            map_fields(lambda size: [None] * size, depth) for _ in range(program.num_stages)
        ]
        self.done: dict[tuple[str, int, int], int] = {}
        self.tick = 0
        self.stage = 0

    def at(self, table: Table) -> int:
        return table[self.stage][self.tick]

    def read(self, ring: Ring, slots: Table) -> Any:
        slot = self.at(slots)
        assert slot >= 0
        return ring[slot]

    def write(self, ring: Ring, slots: Table, value: Any) -> None:
        slot = self.at(slots)
        if slot >= 0:
            ring[slot] = value

    def once(self, kind: str, part: int, microbatch: int) -> None:
        key = (kind, part, microbatch)
        assert key not in self.done, key
        self.done[key] = self.tick

    def run(self) -> None:
        program = self.program
        assert [run.start for run in program.runs[1:]] == [run.stop for run in program.runs[:-1]]
        assert (program.runs[0].start, program.runs[-1].stop) == (0, program.num_ticks)
        for run in program.runs:
            for self.tick in range(run.start, run.stop):
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
        assert set(self.done) == {
            (kind, part, m) for kind in kinds for part in parts for m in microbatches
        }

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
            assert (target >= 0) == (self.at(transfers.send) >= 0)
            if target >= 0:
                assert (self.stage, target) in sends[(target - self.stage) % stages]
                assert target not in landing
                landing[target] = (
                    self.stage,
                    self.read(buffers_of(self.buffers[self.stage]).send, transfers.send),
                )
        for self.stage in range(stages):
            source = self.at(transfers.recv_from)
            assert (source >= 0) == (self.stage in landing) == (self.at(transfers.recv) >= 0)
            if source >= 0:
                sender, sent = landing[self.stage]
                assert sender == source
                self.write(
                    buffers_of(self.buffers[self.stage]).recv, transfers.recv, (*sent, self.tick)
                )

    def take(
        self, transfers: Transfers[Table], rings: TransferBuffers[Ring], *, unbuffered: bool
    ) -> Any:
        """The value that an action reads, or None.

        Received ones carry the tick of their arrival.
        """
        received, local = self.at(transfers.read), self.at(transfers.local_read)
        assert received < 0 or local < 0
        if received >= 0:
            *named, arrived = self.read(rings.recv, transfers.read)
            assert not unbuffered or arrived == self.tick
            return tuple(named)
        return self.read(rings.local, transfers.local_read) if local >= 0 else None

    def forward(self, *, allowed: bool) -> None:
        tables, buffers, transfers = self.tables, self.buffers[self.stage], self.tables.activations
        microbatch = self.at(tables.forward.microbatch)
        if microbatch < 0:
            if allowed and self.program.training:
                assert self.at(tables.residual_write) >= 0
                self.write(buffers.residuals, tables.residual_write, "garbage")
            else:
                assert self.at(tables.residual_write) < 0
            assert self.at(transfers.write) == self.at(transfers.local_write) == -1
            return
        assert allowed
        part = self.program.placement.virtual[self.stage][self.at(tables.forward.chunk)]
        taken = self.take(
            transfers, buffers.activations, unbuffered=self.program.unbuffered.activations.recv
        )
        assert taken == (None if part == 0 else ("act", part - 1, microbatch))
        assert self.at(tables.input_microbatch) == (
            microbatch if part == 0 else self.at(tables.input_microbatch)
        )
        if part == 0 and self.tick:
            assert tables.next_input_microbatch[self.stage][self.tick - 1] == microbatch
        if part == self.last:
            at = self.tick + self.program.delays_loss
            assert all(row[at] == microbatch for row in tables.loss_microbatch)
            assert not self.program.training or tables.loss_gradient_write[self.stage][
                at
            ] == self.at(tables.residual_write)
        writes = [self.at(transfers.write) >= 0, self.at(transfers.local_write) >= 0]
        assert sum(writes) == (part < self.last)
        self.write(buffers.activations.send, transfers.write, ("act", part, microbatch))
        self.write(buffers.activations.local, transfers.local_write, ("act", part, microbatch))
        self.write(buffers.residuals, tables.residual_write, ("residual", part, microbatch))
        self.once("F", part, microbatch)

    def backward(self, *, allowed: bool) -> None:
        tables, buffers, transfers = self.tables, self.buffers[self.stage], self.tables.gradients
        microbatch = self.at(tables.backward.microbatch)
        if microbatch < 0:
            assert (
                self.at(transfers.write)
                == self.at(transfers.local_write)
                == self.at(tables.pending_write)
                == -1
            )
            return
        assert allowed
        part = self.program.placement.virtual[self.stage][self.at(tables.backward.chunk)]
        taken = self.take(
            transfers, buffers.gradients, unbuffered=self.program.unbuffered.gradients.recv
        )
        if part == self.last:
            assert microbatch in tables.loss_microbatch[self.stage][: self.tick + 1]
        if part == 0 and self.tick + 1 < self.program.num_ticks:
            assert all(
                row[self.tick + 1] == microbatch for row in tables.last_input_grad_microbatch
            )
        assert taken == (None if part == self.last else ("grad", part + 1, microbatch))
        assert self.read(buffers.residuals, tables.residual_read) == ("residual", part, microbatch)
        writes = [self.at(transfers.write) >= 0, self.at(transfers.local_write) >= 0]
        assert sum(writes) == (part > 0)
        self.write(buffers.gradients.send, transfers.write, ("grad", part, microbatch))
        self.write(buffers.gradients.local, transfers.local_write, ("grad", part, microbatch))
        self.write(buffers.pending, tables.pending_write, ("pending", part, microbatch, self.tick))
        self.once("B", part, microbatch)
        if self.at(tables.pending_write) < 0:
            self.once("W", part, microbatch)

    def weight(self, *, allowed: bool) -> None:
        tables, buffers = self.tables, self.buffers[self.stage]
        microbatch = self.at(tables.weight.microbatch)
        if microbatch < 0:
            return
        assert allowed
        part = self.program.placement.virtual[self.stage][self.at(tables.weight.chunk)]
        *pending, since = self.read(buffers.pending, tables.pending_read)
        assert tuple(pending) == ("pending", part, microbatch)
        assert not self.program.unbuffered.pending or since == self.tick
        assert self.read(buffers.residuals, tables.weight_residual_read) == (
            "residual",
            part,
            microbatch,
        )
        self.once("W", part, microbatch)


def require_tight(program: TickProgram) -> None:
    """Residual depth is the largest number alive at once, counted here from the actions."""
    tables = program.tables
    for stage in range(program.num_stages):
        alive: set[tuple[int, int]] = set()
        peak = 0
        for tick in range(program.num_ticks):
            if tables.forward.microbatch[stage][tick] >= 0:
                alive.add(
                    (tables.forward.chunk[stage][tick], tables.forward.microbatch[stage][tick])
                )
            peak = max(peak, len(alive))
            if (
                tables.backward.microbatch[stage][tick] >= 0
                and tables.pending_write[stage][tick] < 0
            ):
                alive.discard(
                    (tables.backward.chunk[stage][tick], tables.backward.microbatch[stage][tick])
                )
            if tables.weight.microbatch[stage][tick] >= 0:
                alive.discard(
                    (tables.weight.chunk[stage][tick], tables.weight.microbatch[stage][tick])
                )
        assert program.in_flight(stage) == peak
    assert program.peak_in_flight == max(map(program.in_flight, range(program.num_stages)))
