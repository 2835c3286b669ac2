"""The evaluation loop: a forward-only tick program, from a batch to the model's outputs or their losses."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._parts import StageParts
from ._ring import guard, make_ring, read_ring, write_ring_if
from ._train import Carry, Device, Row, exchange

Measure = Callable[[PyTree, PyTree], PyTree]
"""A function of `(outputs, labels)` of one microbatch, with arrays for results."""


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

    def run(self, device: Device, measure: Measure) -> PyTree:
        """Run the whole program.

        Args:
            device: This device.
            measure: What is wanted of each microbatch; run on the last stage alone.

        Returns:
            On the last stage the results of `measure`, leaves `[num_microbatches, ...]`, else zeros.
        """
        depth, form = self._program.depth, self._parts.activations.struct
        wanted = jax.eval_shape(lambda: self._measure(device, jnp.int32(0), self._parts.activations.zeros(), measure))
        carry: Carry = {"results": make_ring(wanted, self._program.num_microbatches)}
        carry |= {name: make_ring(form, depth[name]) for name in ("act_in", "act_out") if depth[name]}
        for run in self._program.runs:
            rows = {
                name: jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[device.stage]
                for name, table in self._program.tables.items()
            }
            carry, _ = jax.lax.scan(
                lambda c, row, run=run: (self._tick(device, run, c, row, measure), None), carry, rows
            )
        return carry["results"]

    def _tick(self, device: Device, run: TickRun, carry: Carry, row: Row, measure: Measure) -> Carry:
        carry = dict(carry)
        arrived = self._parts.activations.zeros()
        if "act_in" in carry:
            if run.has_act:
                sent = exchange(carry["act_out"], row["act_send"], 1, self._parts.num_stages)
                carry["act_in"] = write_ring_if(carry["act_in"], sent, row["act_recv"])
            arrived = read_ring(carry["act_in"], row["forward_read"])
        index = row["forward_microbatch"]
        batch = device.microbatch(index).without_key()
        output = guard(
            index >= 0,
            lambda: self._parts.evaluate(device.place, batch, device.collections, arrived),
            skip=self._skip,
        )
        if "act_out" in carry:
            carry["act_out"] = write_ring_if(carry["act_out"], output, row["forward_write"])
        is_last = (device.stage == self._last) & (index >= 0)
        result = guard(is_last, lambda: self._measure(device, index, output, measure), skip=True)
        carry["results"] = write_ring_if(carry["results"], result, jnp.where(is_last, index, -1))
        return carry

    def _measure(self, device: Device, index: jax.Array, output: PyTree, measure: Measure) -> PyTree:
        batch = device.microbatch(index).without_key()
        return measure(self._parts.outputs(device.place, batch, device.collections, output), batch.labels)
