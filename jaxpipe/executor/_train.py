"""The training loop: a tick program run by every device, from a batch to summed losses and gradients."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._batch import Microbatch
from ._buffers import make_ring, read_ring, run_cell, select, to_memory, write_ring, write_ring_if, zeros_of
from ._cell import Cell
from ._stage import StageParts
from ._tick_loop import Carry, Device, Row, TickLoop


@dataclass(frozen=True)
class Totals:
    """What a device has summed up over the microbatches of a batch.

    Attributes:
        loss: Losses, on the last part's stage, else 0.
        trunk: Gradients of the trunk, `[num_chunks, ...]`.
        own: Gradients of the stage's own parameters.
        ends: Gradients of the layers that all stages run together, by name.
        collections: The stage's collections after the last microbatch.
        values: What the stage's layers reported.
    """

    loss: jax.Array
    trunk: PyTree
    own: PyTree
    ends: dict[str, jax.Array]
    collections: PyTree
    values: jax.Array


class TrainLoop(TickLoop):
    """A training program bound to the computing of a model's parts.

    Args:
        parts: The computing.
        program: The lowered training schedule.
        skip_idle: Branch around idle cells, and on the chunk; otherwise idle cells compute and the result is dropped.
    """

    def __init__(self, parts: StageParts, program: TickProgram, *, skip_idle: bool) -> None:
        super().__init__(parts, program, ("act", "grad"), skip_idle=skip_idle)
        stage, chunk = parts.placement.home[-1]
        each = [zip(self.chunks(k, stage), program.tables[f"{k}_microbatch"][stage], strict=True) for k in _COMPUTING]
        self._fused_loss = all(f == b for f, b in zip(*each, strict=True) if b[0] == chunk)
        """Whether every loss is followed by its backward in the same tick, so that its gradient need not wait."""

    def run(self, device: Device) -> Totals:
        """Run the whole program."""
        parts, program = self.parts, self.program
        carry = self.empty_rings()
        carry["kept"] = self._hosted(make_ring(parts.kept, program.residual_slots), jax.memory.Space.Host)
        carry["pending"] = make_ring(parts.pending, program.depth["pending"])
        if not self._fused_loss:
            carry["loss_gradient"] = make_ring(parts.gradients.struct, program.residual_slots)
        sums = parts.trunk_gradients
        # One chunk has no dim of its own: with it XLA would copy every sum in every tick.
        carry["trunk"] = make_ring(sums, program.num_chunks) if program.num_chunks > 1 else zeros_of(sums)
        carry["own"] = parts.zero_own_gradients()
        carry["ends"] = parts.zero_end_gradients()
        carry["loss"] = jnp.zeros((), jnp.float32)
        carry["collections"] = device.collections
        carry["values"] = jnp.zeros((program.num_chunks, parts.num_values), jnp.float32)
        carry["last_values"] = jnp.zeros((len(parts.epilogue.aux.names),), jnp.float32)
        carry = self.scan(device, lambda run, c, row: self._tick(device, run, c, row), carry)
        values = jnp.concatenate([carry["values"].reshape(-1), carry["last_values"]])
        trunk = carry["trunk"] if program.num_chunks > 1 else jax.tree.map(lambda x: x[None], carry["trunk"])
        return Totals(carry["loss"], trunk, carry["own"], carry["ends"], carry["collections"], values)

    def _tick(self, device: Device, run: TickRun, carry: Carry, row: Row) -> None:
        activation, gradient = (self.arrive(device, run, carry, row, kind) for kind in ("act", "grad"))
        loss_gradient = self.parts.gradients.zeros()
        if run.has_forward:
            loss_gradient, gradient = self._forward(device, run, carry, row, activation, gradient)
        if run.has_backward and self.parts.last:
            self._backward(device, run, carry, row, gradient, loss_gradient)
        if run.has_weight and self.parts.last:
            self._weight(device, run, carry, row)

    def _forward(
        self, device: Device, run: TickRun, carry: Carry, row: Row, arrived: PyTree, gradient: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run the forward; gives the gradient of the loss, and the gradient that arrived."""
        parts, held = self.parts, carry["collections"]
        batch = self.microbatch(device, run, row, train=True)
        output, kept, collections, values = self.cell(
            device, run, "forward", row, [lambda at: parts.forward(at, device.held, batch, held, arrived)]
        )
        held = select(row["forward_microbatch"] >= 0, collections, held)
        carry["values"] = carry["values"].at[row["forward_chunk"]].add(values)
        carry["kept"] = write_ring(carry["kept"], self._hosted(kept, jax.memory.Space.Host), row["residual_write"])
        if not self._skip:
            # Else XLA merges exchanges of gradients and activations in one direction, and neither lies under a cell.
            output, gradient = jax.lax.optimization_barrier((output, gradient))
        self.leave(device, run, carry, row, "act", output)
        if parts.final is not None:
            carry["collections"] = held
            loss_gradient = self._loss_together(device, run, carry, row, batch, output)
        else:
            loss_gradient = self._loss(device, run, carry, row, batch, held, output)
        if not self._fused_loss:
            carry["loss_gradient"] = write_ring(carry["loss_gradient"], loss_gradient, row["residual_write"])
        return loss_gradient, gradient

    def _loss(
        self, device: Device, run: TickRun, carry: Carry, row: Row, batch: Microbatch, held: PyTree, output: PyTree
    ) -> PyTree:
        """Run the epilogue where the last part is; gives the gradient of the output."""
        parts = self.parts
        is_last = self.is_last(device, row, "forward")
        is_always = parts.last == 0 and self.is_full("forward", run)
        loss, own, gradient, collections, values = run_cell(
            None if is_always else jnp.where(is_last, 0, -1),
            [lambda: parts.loss_and_gradients(device.held, batch, held, output, device.seeds)],
        )
        carry["collections"] = select(is_last, collections, held)
        carry["last_values"] = carry["last_values"] + values
        carry["loss"] = carry["loss"] + loss
        carry["own"] = jax.tree.map(jnp.add, carry["own"], own)
        return gradient

    def _loss_together(
        self, device: Device, run: TickRun, carry: Carry, row: Row, batch: Microbatch, output: PyTree
    ) -> PyTree:
        """Run the last layers and the loss on all stages; gives the gradient of the output where the last part is."""
        is_home = self.is_last(device, row, "forward")
        batch = dataclasses.replace(batch, context=device.feed.context(row["leaving"]))

        def compute() -> PyTree:
            return self.parts.loss_together(device.held, batch, is_home, output, device.seeds[0])

        loss, grads, gradient = self.together(run, row, "leaving", compute)
        carry["loss"] = carry["loss"] + loss
        _add_ends(carry, grads)
        return gradient

    def _backward(
        self, device: Device, run: TickRun, carry: Carry, row: Row, arrived: PyTree, loss_gradient: PyTree
    ) -> None:
        if not self._fused_loss:
            loss_gradient = read_ring(carry["loss_gradient"], row["residual_read"])
        gradient = select(self.is_last(device, row, "backward"), loss_gradient, arrived)
        ring = carry["kept"]

        def given() -> tuple:
            return device.held, self._kept(ring, row["residual_read"]), gradient, device.seeds[1]

        def whole(at: Cell) -> tuple:
            return (*self.parts.backward(at, *given()), zeros_of(self.parts.pending))

        def half(at: Cell) -> tuple:
            trunk, *rest = self.parts.backward_input(at, *given())
            return (_with_zeros(trunk, jax.eval_shape(lambda: whole(at))[0]) if len(computes) > 1 else trunk, *rest)

        halves = self._halves(run)
        computes = [compute for compute, is_half in ((whole, False), (half, True)) if is_half in halves]
        which = (row["pending_write"] >= 0).astype(jnp.int32) if len(computes) > 1 else 0
        trunk, own, outgoing, pending = self.cell(device, run, "backward", row, computes, which)
        if True in halves:
            carry["pending"] = write_ring_if(carry["pending"], pending, row["pending_write"])
        self.leave(device, run, carry, row, "grad", outgoing)
        self._add(carry, row["backward_chunk"], trunk, own)
        if self.parts.first is not None:
            is_first = self.is_first(device, row, "backward")
            entered = select(is_first, outgoing, zeros_of(outgoing))
            returning = row["returning"]
            batch = Microbatch(device.feed.inputs(returning), None, device.feed.context(returning))
            compute = functools.partial(self.parts.first_gradients, device.held, batch, entered)
            _add_ends(carry, self.together(run, row, "returning", compute))

    def _weight(self, device: Device, run: TickRun, carry: Carry, row: Row) -> None:
        rings = carry["kept"], carry["pending"]

        def half(at: Cell) -> tuple:
            kept = self._kept(rings[0], row["weight_residual_read"])
            return self.parts.backward_weight(at, device.held, kept, read_ring(rings[1], row["pending_read"]))

        trunk, own = self.cell(device, run, "weight", row, [half])
        self._add(carry, row["weight_chunk"], trunk, own)

    def _halves(self, run: TickRun) -> set[bool]:
        """Whether the backwards of a run are only the input halves; both where there are such and such."""
        slots = self.program.tables["pending_write"]
        return {
            slot >= 0
            for s, row in enumerate(slots)
            for slot, chunk in zip(row[run.start : run.stop], self.chunks("backward", s, run), strict=True)
            if chunk >= 0
        }

    def _hosted(self, kept: PyTree, space: Any) -> PyTree:
        return to_memory(kept, self.parts.is_hosted, space)

    def _kept(self, ring: PyTree, slot: jax.Array) -> PyTree:
        return self._hosted(read_ring(ring, slot), jax.memory.Space.Device)

    def _add(self, carry: Carry, chunk: jax.Array, trunk: PyTree, own: PyTree) -> None:
        """Add a cell's gradients to the sums; leaves of the trunk that are None are not its to give."""
        totals, treedef = jax.tree.flatten(carry["trunk"])
        at = jnp.maximum(chunk, 0)

        def add(total: jax.Array, g: jax.Array) -> jax.Array:
            g = g.astype(total.dtype)
            return write_ring(total, read_ring(total, at) + g, at) if self.program.num_chunks > 1 else total + g

        grads = treedef.flatten_up_to(trunk)
        added = [total if g is None else add(total, g) for total, g in zip(totals, grads, strict=True)]
        carry["trunk"] = jax.tree.unflatten(treedef, added)
        if self.parts.prologue.has_params:
            carry["own"] = jax.tree.map(jnp.add, carry["own"], own)


_COMPUTING = ("forward", "backward")


def _add_ends(carry: Carry, grads: dict[str, jax.Array]) -> None:
    totals = carry["ends"]
    carry["ends"] = totals | {name: totals[name] + g.astype(totals[name].dtype) for name, g in grads.items()}


def _with_zeros(grads: PyTree, struct: PyTree) -> PyTree:
    """Zeros in place of leaves that are None."""
    leaves, treedef = jax.tree.flatten(struct)
    pairs = zip(treedef.flatten_up_to(grads), leaves, strict=True)
    return jax.tree.unflatten(treedef, [zeros_of(x) if g is None else g for g, x in pairs])
