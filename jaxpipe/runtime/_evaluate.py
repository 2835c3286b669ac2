"""The evaluation loop: a forward-only tick program, from a batch to summed losses."""

import jax
import jax.numpy as jnp

from jaxpipe.schedules import TickProgram, TickRun

from ._parts import StageParts
from ._ring import guard, make_ring, read_ring, write_ring_if
from ._train import Carry, Device, Row, exchange


class EvaluateLoop:
    """A forward-only tick program bound to the computing of a model's stages.

    Args:
        parts: The computing.
        program: The lowered inference schedule.
        skip_idle: Branch around idle cells; otherwise they compute and the result is dropped.
    """

    def __init__(self, parts: StageParts, program: TickProgram, *, skip_idle: bool) -> None:
        self._parts, self._program, self._skip = parts, program, skip_idle
        self._last = parts.num_stages - 1

    def run(self, device: Device) -> jax.Array:
        """Run the whole program.

        Returns:
            The sum of the losses on the last stage, else 0.
        """
        depth, form = self._program.depth, self._parts.activations.struct
        carry: Carry = {"loss": jnp.zeros((), jnp.float32)}
        carry |= {name: make_ring(form, depth[name]) for name in ("act_in", "act_out") if depth[name]}
        for run in self._program.runs:
            rows = {
                name: jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[device.stage]
                for name, table in self._program.tables.items()
            }
            carry, _ = jax.lax.scan(lambda c, row, run=run: (self._tick(device, run, c, row), None), carry, rows)
        return carry["loss"]

    def _tick(self, device: Device, run: TickRun, carry: Carry, row: Row) -> Carry:
        carry = dict(carry)
        arrived = self._parts.activations.zeros()
        if "act_in" in carry:
            if run.has_act:
                sent = exchange(carry["act_out"], row["act_send"], 1, self._parts.num_stages)
                carry["act_in"] = write_ring_if(carry["act_in"], sent, row["act_recv"])
            arrived = read_ring(carry["act_in"], row["forward_read"])
        index = row["forward_microbatch"]
        batch = device.microbatch(index).without_key()

        def forward() -> jax.Array:
            return self._parts.evaluate(device.stage, device.storage, device.trunk, batch, arrived)

        output = guard(index >= 0, forward, skip=self._skip)
        if "act_out" in carry:
            carry["act_out"] = write_ring_if(carry["act_out"], output, row["forward_write"])
        is_loss = (device.stage == self._last) & (index >= 0)
        loss = guard(is_loss, lambda: self._parts.loss(device.storage, batch, output), skip=True)
        carry["loss"] = carry["loss"] + loss.astype(jnp.float32)
        return carry
