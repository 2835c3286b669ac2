"""The evaluation loop: a forward-only tick program, from a batch to the model's outputs or their losses."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram, TickRun

from ._batch import Microbatch
from ._buffers import make_ring, run_cell, write_ring_if
from ._stage import StageParts
from ._tick_loop import Carry, Device, Row, TickLoop

Measure = Callable[[PyTree, PyTree], PyTree]
"""A function of `(outputs, labels)` of one microbatch, with arrays for results."""


class EvaluateLoop(TickLoop):
    """A forward-only tick program bound to the computing of a model's parts.

    Args:
        parts: The computing.
        program: The lowered inference schedule.
        skip_idle: Branch around idle cells, and on the chunk; otherwise idle cells compute and the result is dropped.
    """

    def __init__(self, parts: StageParts, program: TickProgram, *, skip_idle: bool) -> None:
        super().__init__(parts, program, ("act",), skip_idle=skip_idle)

    def run(self, device: Device, measure: Measure) -> PyTree:
        """Run the whole program.

        Args:
            device: This device.
            measure: What is wanted of each microbatch; run where the last part is, alone, or on all stages where they
                run the last layers together.

        Returns:
            There the results of `measure`, leaves `[num_microbatches, ...]`, elsewhere zeros.
        """

        def start() -> PyTree:
            nothing, none = self.parts.activations.zeros(), jnp.int32(-1)
            return self._measure(device, device.feed.microbatch(none, none, none), none >= 0, nothing, measure)

        results = make_ring(jax.eval_shape(start), self.program.num_microbatches)
        carry: Carry = {"results": results, **self.empty_rings()}
        return self.scan(device, lambda run, c, row: self._tick(device, run, c, row, measure), carry)["results"]

    def _tick(self, device: Device, run: TickRun, carry: Carry, row: Row, measure: Measure) -> None:
        arrived = self.arrive(device, run, carry, row, "act")
        batch = self.microbatch(device, run, row, train=False)
        output = self.cell(
            device,
            run,
            "forward",
            row,
            [lambda at: self.parts.evaluate(at, device.held, batch, device.collections, arrived)],
        )
        self.leave(device, run, carry, row, "act", output)
        is_last = self.is_last(device, row, "forward")
        if self.parts.final is None:
            which = jnp.where(is_last, 0, -1)
            result = run_cell(which, [lambda: self._measure(device, batch, is_last, output, measure)])
        else:
            batch = dataclasses.replace(batch, context=device.feed.context(row["leaving"]))
            compute = functools.partial(self._measure, device, batch, is_last, output, measure)
            result = self.together(run, row, "leaving", compute)
        carry["results"] = write_ring_if(carry["results"], result, jnp.where(is_last, row["forward_microbatch"], -1))

    def _measure(
        self, device: Device, batch: Microbatch, is_last: jax.Array, output: PyTree, measure: Measure
    ) -> PyTree:
        batch = batch.without_key()
        return measure(self.parts.outputs(device.held, batch, is_last, device.collections, output), batch.labels)
