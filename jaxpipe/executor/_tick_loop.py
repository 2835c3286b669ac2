"""Running a tick program: what travels, what waits in rings, and which cell a device runs in a tick."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._batch import Feed, Microbatch, feeding
from ._buffers import make_ring, read_ring, run_cell, select, write_ring_if, zeros_of
from ._cell import Cell
from ._exchange import exchange, following, is_prompt, travelling
from ._stage import Held, StageParts

Carry = dict[str, Any]
Row = dict[str, jax.Array]
CELLS = {"act": "forward", "grad": "backward"}
"""Which cell takes and gives a kind of value that travels."""


@dataclass(frozen=True)
class Device:
    """Where a device stands and what it holds, inside `shard_map`.

    Attributes:
        stage: Index along the `stage` axis.
        held: Its parameters.
        collections: The stage's collections.
        feed: The batch.
        seeds: What the loss, and the losses that layers report, are multiplied with before differentiation.
    """

    stage: jax.Array
    held: Held
    collections: PyTree
    feed: Feed
    seeds: tuple[jax.Array, jax.Array]


class TickLoop:
    """A tick program bound to the computing of a model's parts.

    What was computed in one tick and is sent in the next does not wait in a ring: activations travel at the end of
    their tick, under its backward, and gradients at the beginning of the next, under its forward. Where idle cells are
    skipped nothing travels under a cell, and an exchange amid a tick would make stages without a forward wait for those
    that have one; there both travel at the beginning of the next.

    Args:
        parts: The computing.
        program: The lowered schedule.
        kinds: What travels: `act`, `grad`.
        skip_idle: Branch around idle cells, and on the chunk; otherwise idle cells compute and the result is dropped.
    """

    def __init__(self, parts: StageParts, program: TickProgram, kinds: Sequence[str], *, skip_idle: bool) -> None:
        self.parts, self.program, self._skip = parts, program, skip_idle
        forms = {"act": parts.activations, "grad": parts.gradients}
        self._forms = {kind: forms[kind] for kind in kinds}
        self._prompt = {kind for kind in kinds if is_prompt(program, kind)}
        buffers = [f"{kind}_out" for kind in kinds if kind not in self._prompt]
        buffers += [f"{kind}_in" for kind in kinds if f"{kind}_in" not in program.direct]
        buffers += [f"{kind}_local" for kind in kinds]
        self._buffers = [name for name in buffers if program.depth[name]]
        sources = {f"{kind}_from": program.tables[f"{kind}_recv_from"] for kind in kinds}
        later = {f"{name}_next": following(table) for name, table in sources.items()}
        self._feeding = feeding(program)
        self._tables = {**program.tables, **self._feeding, **sources, **later}

    def empty_rings(self) -> Carry:
        """What the carry holds for values that travel, before the first tick."""
        rings = {
            name: make_ring(self._forms[name.split("_")[0]].struct, self.program.depth[name]) for name in self._buffers
        }
        return rings | {kind: zeros_of(self._forms[kind].struct) for kind in self._prompt}

    def scan(self, device: Device, tick: Callable[[TickRun, Carry, Row], None], carry: Carry) -> Carry:
        """Run all ticks, one loop for each run of equal content; `tick` replaces entries of the carry."""

        def body(run: TickRun, carry: Carry, row: Row) -> tuple[Carry, None]:
            carry = dict(carry)
            tick(run, carry, row)
            return carry, None

        for run in self.program.runs:
            rows = {
                name: jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[device.stage]
                for name, table in self._tables.items()
            }
            carry, _ = jax.lax.scan(lambda c, row, run=run: body(run, c, row), carry, rows)
        return carry

    def arrive(self, device: Device, run: TickRun, carry: Carry, row: Row, kind: str) -> PyTree:
        """Let a kind of value travel, and give what this tick's cell takes."""
        cell = CELLS[kind]
        pairs = travelling(self.program, kind, range(run.start, run.stop))
        arrived = carry[kind] if kind in carry else self._forms[kind].zeros()
        if pairs and not self._travels_early(kind):
            sent = carry[kind] if kind in carry else read_ring(carry[f"{kind}_out"], row[f"{kind}_send"])
            arrived = exchange(sent, pairs, device.stage, row[f"{kind}_from"], self.program.num_stages)
        if f"{kind}_in" in carry:
            if pairs:
                carry[f"{kind}_in"] = write_ring_if(carry[f"{kind}_in"], arrived, row[f"{kind}_recv"])
            arrived = read_ring(carry[f"{kind}_in"], row[f"{cell}_read"])
        if f"{kind}_local" in carry:
            at = row[f"{cell}_local_read"]
            arrived = select(at >= 0, read_ring(carry[f"{kind}_local"], at), arrived)
        return arrived

    def leave(self, device: Device, run: TickRun, carry: Carry, row: Row, kind: str, value: PyTree) -> None:
        """Hand on what a cell computed."""
        cell = CELLS[kind]
        for buffer, slot in ((f"{kind}_local", f"{cell}_local_write"), (f"{kind}_out", f"{cell}_write")):
            if buffer in carry:
                carry[buffer] = write_ring_if(carry[buffer], value, row[slot])
        if kind not in carry:
            return
        carry[kind] = value
        if self._travels_early(kind):
            pairs = travelling(self.program, kind, range(run.start + 1, run.stop + 1))
            arrived = exchange(value, pairs, device.stage, row["act_from_next"], self.program.num_stages)
            # Keeps XLA from moving the exchange into the next tick, where nothing would lie between it and its use.
            carry[kind] = jax.lax.optimization_barrier(arrived)

    def _travels_early(self, kind: str) -> bool:
        """Whether a kind of value travels in the tick that computes it."""
        return kind == "act" and kind in self._prompt and not self._skip

    def cell(
        self,
        device: Device,
        run: TickRun,
        kind: str,
        row: Row,
        computes: Sequence[Callable[[Cell], Any]],
        which: jax.Array | int = 0,
    ) -> Any:
        """Run a cell for the chunk it is on; without a condition where it is never idle and always the same.

        Args:
            device: This device.
            run: The run that the tick is in.
            kind: `forward`, `backward` or `weight`.
            row: The tick's tables.
            computes: What can be computed; all give trees of the same form.
            which: Which of these.

        Returns:
            The result, or zeros where the cell is idle.
        """
        placement = self.parts.placement
        index, chunk = row[f"{kind}_microbatch"], row[f"{kind}_chunk"]
        chunks: list[Any] = sorted(
            {c for s in range(placement.num_stages) for c in self.chunks(kind, s, run) if c >= 0}
        )
        if self._skip and len(chunks) > 1:
            which = which * len(chunks) + jnp.searchsorted(jnp.asarray(chunks, jnp.int32), chunk).astype(jnp.int32)
        elif len(chunks) > 1:
            chunks = [jnp.maximum(chunk, 0)]
        cells = [lambda run=run, c=c: run(Cell(device.stage, c, placement)) for run in computes for c in chunks]
        if len(cells) == 1 and self.is_full(kind, run):
            return run_cell(None, cells)
        return run_cell(jnp.where(index >= 0, which, -1), cells, skip=self._skip)

    def together(self, run: TickRun, row: Row, name: str, compute: Callable[[], PyTree]) -> PyTree:
        """Run what all stages run at once, or give zeros in ticks without it.

        Args:
            run: The run that the tick is in.
            row: The tick's tables.
            name: `entering`, `leaving` or `returning`: the microbatch it works on.
            compute: The computing; it may hold collectives over the stages.
        """
        is_always = all(microbatch >= 0 for microbatch in self._feeding[name][0][run.start : run.stop])
        return run_cell(None if is_always else jnp.where(row[name] >= 0, 0, -1), [compute])

    def microbatch(self, device: Device, run: TickRun, row: Row, *, train: bool) -> Microbatch:
        """What this tick's forward knows of its microbatch; layers before part 0 have run where all stages run them."""
        batch = device.feed.microbatch(row["entering"], row["leaving"], row["forward_microbatch"])
        first = self.parts.first
        if first is not None:
            context = device.feed.context(row["entering"])

            def compute() -> PyTree:
                own = context if train else (None, context[1])
                return first.outputs(device.held.storage, batch.inputs, own, train=train)

            batch = dataclasses.replace(batch, inputs=self.together(run, row, "entering", compute))
        return batch if train else batch.without_key()

    def chunks(self, kind: str, stage: int, run: TickRun | None = None) -> Sequence[int]:
        """The chunks that a stage's cells of a kind are on, tick by tick; -1 where idle."""
        row = self.program.tables[f"{kind}_chunk"][stage]
        return row if run is None else row[run.start : run.stop]

    def is_full(self, kind: str, run: TickRun) -> bool:
        """Whether no stage is ever idle in a run."""
        return all(c >= 0 for s in range(self.program.num_stages) for c in self.chunks(kind, s, run))

    def is_last(self, device: Device, row: Row, kind: str) -> jax.Array:
        """Whether this device's cell is the last part of the model."""
        return self._is_part(device, row, kind, -1)

    def is_first(self, device: Device, row: Row, kind: str) -> jax.Array:
        """Whether it is part 0."""
        return self._is_part(device, row, kind, 0)

    def _is_part(self, device: Device, row: Row, kind: str, part: int) -> jax.Array:
        stage, chunk = self.parts.placement.home[part]
        return (device.stage == stage) & (row[f"{kind}_chunk"] == chunk)
