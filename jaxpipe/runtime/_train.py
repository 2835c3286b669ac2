"""The training loop: a tick program run by every device, from a batch to summed losses and gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._parts import Microbatch, Place, StageParts
from ._ring import guard, make_ring, read_ring, select, to_memory, write_ring, write_ring_if
from ._rng import microbatch_key

Carry = dict[str, Any]
Row = dict[str, jax.Array]


@dataclass(frozen=True)
class Device:
    """Where a device stands and what it holds, inside `shard_map`.

    Attributes:
        place: Its stage and parameters.
        replica: Index along the `data` axis.
        collections: The stage's collections.
        batch: `(inputs, labels, side)`, leaves `[num_microbatches, microbatch_size, ...]`.
        rng: The run's key.
        step: Number of batches so far.
        seeds: What the loss, and the losses that layers report, are multiplied with before differentiation.
        first: Place of the first microbatch in its step, where the batch is only a part of one.
    """

    place: Place
    replica: jax.Array
    collections: PyTree
    batch: tuple[PyTree, PyTree, PyTree]
    rng: jax.Array
    step: jax.Array
    seeds: tuple[jax.Array, jax.Array]
    first: jax.Array | int = 0

    @property
    def stage(self) -> jax.Array:
        """Index along the `stage` axis."""
        return self.place.stage

    def microbatch(self, index: jax.Array) -> Microbatch:
        """One microbatch of this replica; index -1 (idle) gives microbatch 0."""
        at = jnp.maximum(index, 0)
        inputs, labels, side = read_ring(self.batch, at)
        key = microbatch_key(self.rng, self.step, self.first + at, self.replica)
        return Microbatch(inputs, labels, (key, side))


@dataclass(frozen=True)
class Totals:
    """What a device has summed up over the microbatches of a batch.

    Attributes:
        loss: Losses, on the last stage, else 0.
        trunk: Gradients of the trunk.
        own: Gradients of the stage's own parameters.
        collections: The stage's collections after the last microbatch.
        values: What the stage's layers reported.
    """

    loss: jax.Array
    trunk: PyTree
    own: PyTree
    collections: PyTree
    values: jax.Array


def exchange(ring: PyTree, slot: jax.Array, hop: int, num_stages: int) -> PyTree:
    """Send a slot to the stage `hop` further; what arrives where nobody sends is not to be read."""
    pairs = [(s, s + hop) for s in range(num_stages) if 0 <= s + hop < num_stages]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, "stage", pairs), read_ring(ring, slot))


class TrainLoop:
    """A tick program bound to the computing of a model's stages.

    Args:
        parts: The computing.
        program: The lowered training schedule.
        skip_idle: Branch around idle cells; otherwise they compute and the result is dropped.
    """

    def __init__(self, parts: StageParts, program: TickProgram, *, skip_idle: bool) -> None:
        self._parts, self._program, self._skip = parts, program, skip_idle
        self._last = parts.num_stages - 1
        forward, backward = (program.tables[f"{kind}_microbatch"][self._last] for kind in ("forward", "backward"))
        self._fused_loss = all(b in (-1, f) for f, b in zip(forward, backward, strict=True))
        """Whether every loss is followed by its backward in the same tick, so that its gradient need not wait."""
        self._rings = {
            name: depth
            for name, depth in program.depth.items()
            if name in ("act_in", "act_out", "grad_in", "grad_out", "pending")
            and depth
            and (name == "pending" or name not in program.direct)
        }

    def run(self, device: Device) -> Totals:
        """Run the whole program."""
        parts = self._parts
        forms = {name: parts.activations if name.startswith("act") else parts.gradients for name in self._rings}
        carry: Carry = {name: make_ring(forms[name].struct, depth) for name, depth in self._rings.items()}
        carry["kept"] = self._hosted(make_ring(parts.kept, self._program.residual_slots), jax.memory.Space.Host)
        if not self._fused_loss:
            carry["loss_gradient"] = make_ring(parts.gradients.struct, self._program.residual_slots)
        carry["trunk"] = parts.zero_trunk_gradients(device.place.trunk)
        carry["own"] = parts.zero_own_gradients()
        carry["loss"] = jnp.zeros((), jnp.float32)
        carry["collections"] = device.collections
        carry["values"] = jnp.zeros((parts.num_values,), jnp.float32)
        carry["last_values"] = jnp.zeros((len(parts.epilogue.aux.names),), jnp.float32)
        for run in self._program.runs:
            rows = {
                name: jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[device.stage]
                for name, table in self._program.tables.items()
            }
            carry, _ = jax.lax.scan(lambda c, row, run=run: (self._tick(device, run, c, row), None), carry, rows)
        values = jnp.concatenate([carry["values"], carry["last_values"]])
        return Totals(carry["loss"], carry["trunk"], carry["own"], carry["collections"], values)

    def _tick(self, device: Device, run: TickRun, carry: Carry, row: Row) -> Carry:
        carry = dict(carry)
        activation, gradient = self._exchange(run, carry, row)
        loss_gradient = self._parts.gradients.zeros()
        if run.has_forward:
            loss_gradient = self._forward(device, run, carry, row, activation)
        if run.has_backward:
            self._backward(device, run, carry, row, gradient, loss_gradient)
        if run.has_weight:
            self._weight(device, run, carry, row)
        return carry

    def _exchange(self, run: TickRun, carry: Carry, row: Row) -> tuple[PyTree, PyTree]:
        """Let activations go one stage on and gradients one back; return what this tick's cells take."""
        taken = []
        travels = (("act", run.has_act, 1, "forward_read"), ("grad", run.has_grad, -1, "backward_read"))
        for kind, is_used, hop, read in travels:
            form = self._parts.activations if kind == "act" else self._parts.gradients
            arrived = form.zeros()
            if is_used:
                arrived = exchange(carry[f"{kind}_out"], row[f"{kind}_send"], hop, self._parts.num_stages)
            if f"{kind}_in" in carry:
                if is_used:
                    carry[f"{kind}_in"] = write_ring_if(carry[f"{kind}_in"], arrived, row[f"{kind}_recv"])
                arrived = read_ring(carry[f"{kind}_in"], row[read])
            taken.append(arrived)
        return taken[0], taken[1]

    def _forward(self, device: Device, run: TickRun, carry: Carry, row: Row, arrived: PyTree) -> PyTree:
        index = row["forward_microbatch"]
        batch = device.microbatch(index)
        output, kept, collections, values = self._cell(
            run, "forward", index, lambda: self._parts.forward(device.place, batch, carry["collections"], arrived)
        )
        self._keep(carry, index >= 0, collections)
        carry["values"] = carry["values"] + values
        carry["kept"] = write_ring(carry["kept"], self._hosted(kept, jax.memory.Space.Host), row["residual_write"])
        if "act_out" in carry:
            carry["act_out"] = write_ring_if(carry["act_out"], output, row["forward_write"])
        held = carry["collections"]

        def epilogue() -> tuple:
            return self._parts.loss_and_gradients(device.place, batch, held, output, device.seeds)

        if self._last == 0:
            active, done = index >= 0, self._cell(run, "forward", index, epilogue)
        else:
            active = (device.stage == self._last) & (index >= 0)
            done = guard(active, epilogue, skip=True)
        loss, own, gradient, collections, values = done
        self._keep(carry, active, collections)
        carry["last_values"] = carry["last_values"] + values
        carry["loss"] = carry["loss"] + loss
        carry["own"] = jax.tree.map(jnp.add, carry["own"], own)
        if not self._fused_loss:
            carry["loss_gradient"] = write_ring(carry["loss_gradient"], gradient, row["residual_write"])
        return gradient

    def _backward(
        self, device: Device, run: TickRun, carry: Carry, row: Row, arrived: PyTree, loss_gradient: PyTree
    ) -> None:
        if self._last == 0:
            return
        if not self._fused_loss:
            loss_gradient = read_ring(carry["loss_gradient"], row["residual_read"])
        gradient = select(device.stage == self._last, loss_gradient, arrived)
        index, kept = row["backward_microbatch"], self._kept(carry, row["residual_read"])
        trunk, own, outgoing = self._cell(
            run,
            "backward",
            index,
            lambda: self._parts.backward(device.place, kept, gradient, device.seeds[1]),
        )
        if "grad_out" in carry:
            carry["grad_out"] = write_ring_if(carry["grad_out"], outgoing, row["backward_write"])
        if self._program.has_split_backward:
            is_whole = row["pending_write"] < 0
            trunk, own = select(is_whole, (trunk, own), jax.tree.map(jnp.zeros_like, (trunk, own)))
            carry["pending"] = write_ring_if(carry["pending"], gradient, row["pending_write"])
        self._add(carry, trunk, own)

    def _hosted(self, kept: PyTree, space: Any) -> PyTree:
        return to_memory(kept, self._parts.is_hosted, space)

    def _kept(self, carry: Carry, slot: jax.Array) -> PyTree:
        return self._hosted(read_ring(carry["kept"], slot), jax.memory.Space.Device)

    def _weight(self, device: Device, run: TickRun, carry: Carry, row: Row) -> None:
        if self._last == 0:
            return
        kept = self._kept(carry, row["weight_residual_read"])
        gradient = read_ring(carry["pending"], row["pending_read"])
        trunk, own = self._cell(
            run,
            "weight",
            row["weight_microbatch"],
            lambda: self._parts.backward(device.place, kept, gradient, device.seeds[1])[:2],
        )
        self._add(carry, trunk, own)

    def _keep(self, carry: Carry, active: jax.Array, collections: PyTree) -> None:
        carry["collections"] = select(active, collections, carry["collections"])

    def _add(self, carry: Carry, trunk: PyTree, own: PyTree) -> None:
        carry["trunk"] = jax.tree.map(lambda total, g: total + g.astype(total.dtype), carry["trunk"], trunk)
        if self._parts.prologue.has_params:
            carry["own"] = jax.tree.map(jnp.add, carry["own"], own)

    def _cell(self, run: TickRun, kind: str, index: jax.Array, compute: Any) -> Any:
        """Run a cell; without a guard where no stage is ever idle in the run."""
        table = self._program.tables[f"{kind}_microbatch"]
        is_full = all(cell >= 0 for row in table for cell in row[run.start : run.stop])
        return compute() if is_full else guard(index >= 0, compute, skip=self._skip)
