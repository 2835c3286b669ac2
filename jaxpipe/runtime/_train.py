"""The training loop: a tick program run by every device, from a batch to summed losses and gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._parts import Microbatch, StageParts
from ._ring import guard, make_ring, read_ring, select, write_ring, write_ring_if
from ._rng import microbatch_key

Carry = dict[str, Any]
Row = dict[str, jax.Array]


@dataclass(frozen=True)
class Device:
    """Where a device stands and what it holds, inside `shard_map`.

    Attributes:
        stage: Index along the `stage` axis.
        replica: Index along the `data` axis.
        storage: The stage's parameters.
        trunk: The trunk's parameters, prepared.
        batch: `(inputs, labels, side)`, leaves `[num_microbatches, microbatch_size, ...]`.
        rng: The run's key.
        step: Number of optimiser updates so far.
    """

    stage: jax.Array
    replica: jax.Array
    storage: PyTree
    trunk: PyTree
    batch: tuple[PyTree, PyTree, PyTree]
    rng: jax.Array
    step: jax.Array

    def microbatch(self, index: jax.Array) -> Microbatch:
        """One microbatch of this replica; index -1 (idle) gives microbatch 0."""
        at = jnp.maximum(index, 0)
        inputs, labels, side = read_ring(self.batch, at)
        return Microbatch(inputs, labels, (microbatch_key(self.rng, self.step, at, self.replica), side))


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

    def run(self, device: Device) -> tuple[jax.Array, PyTree, PyTree]:
        """Run the whole program.

        Returns:
            `(sum of the losses on the last stage, else 0; summed gradients of the trunk; of the own parameters)`.
        """
        parts = self._parts
        forms = {name: parts.activations if name.startswith("act") else parts.gradients for name in self._rings}
        carry: Carry = {name: make_ring(forms[name].struct, depth) for name, depth in self._rings.items()}
        carry["kept"] = make_ring(parts.kept, self._program.residual_slots)
        if not self._fused_loss:
            carry["loss_gradient"] = make_ring(parts.gradients.struct, self._program.residual_slots)
        carry["trunk"] = jax.tree.map(jnp.zeros_like, device.trunk)
        carry["own"] = parts.zero_own_gradients()
        carry["loss"] = jnp.zeros((), jnp.float32)
        for run in self._program.runs:
            rows = {
                name: jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[device.stage]
                for name, table in self._program.tables.items()
            }
            carry, _ = jax.lax.scan(lambda c, row, run=run: (self._tick(device, run, c, row), None), carry, rows)
        return carry["loss"], carry["trunk"], carry["own"]

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
        output, kept = self._cell(
            run,
            "forward",
            index,
            lambda: self._parts.forward(device.stage, device.storage, device.trunk, batch, arrived),
        )
        carry["kept"] = write_ring(carry["kept"], kept, row["residual_write"])
        if "act_out" in carry:
            carry["act_out"] = write_ring_if(carry["act_out"], output, row["forward_write"])

        def epilogue() -> tuple[jax.Array, PyTree, PyTree]:
            return self._parts.loss_and_gradients(device.storage, batch, output)

        if self._last == 0:
            loss, own, gradient = self._cell(run, "forward", index, epilogue)
        else:
            loss, own, gradient = guard((device.stage == self._last) & (index >= 0), epilogue, skip=True)
        carry["loss"] = carry["loss"] + loss.astype(jnp.float32)
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
        index, kept = row["backward_microbatch"], read_ring(carry["kept"], row["residual_read"])
        trunk, own, outgoing = self._cell(
            run,
            "backward",
            index,
            lambda: self._parts.backward(device.stage, device.storage, device.trunk, kept, gradient),
        )
        if "grad_out" in carry:
            carry["grad_out"] = write_ring_if(carry["grad_out"], outgoing, row["backward_write"])
        if self._program.has_split_backward:
            is_whole = row["pending_write"] < 0
            trunk, own = select(is_whole, (trunk, own), jax.tree.map(jnp.zeros_like, (trunk, own)))
            carry["pending"] = write_ring_if(carry["pending"], gradient, row["pending_write"])
        self._add(carry, trunk, own)

    def _weight(self, device: Device, run: TickRun, carry: Carry, row: Row) -> None:
        if self._last == 0:
            return
        kept = read_ring(carry["kept"], row["weight_residual_read"])
        gradient = read_ring(carry["pending"], row["pending_read"])
        trunk, own = self._cell(
            run,
            "weight",
            row["weight_microbatch"],
            lambda: self._parts.backward(device.stage, device.storage, device.trunk, kept, gradient)[:2],
        )
        self._add(carry, trunk, own)

    def _add(self, carry: Carry, trunk: PyTree, own: PyTree) -> None:
        carry["trunk"] = jax.tree.map(jnp.add, carry["trunk"], trunk)
        if self._parts.prologue.has_params:
            carry["own"] = jax.tree.map(jnp.add, carry["own"], own)

    def _cell(self, run: TickRun, kind: str, index: jax.Array, compute: Any) -> Any:
        """Run a cell; without a guard where no stage is ever idle in the run."""
        table = self._program.tables[f"{kind}_microbatch"]
        is_full = all(cell >= 0 for row in table for cell in row[run.start : run.stop])
        return compute() if is_full else guard(index >= 0, compute, skip=self._skip)
