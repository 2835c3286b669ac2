"""The evaluation loop: a forward-only tick program, from a batch to the model's outputs or their losses."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickRun, TransferBuffers

from ._batch import Microbatch
from ._buffers import make_ring, run_or_zeros, write_ring_if
from ._tick_loop import Device, Row, TickLoop
from ._virtual_stage import VirtualStage

Measure = Callable[[PyTree, PyTree], PyTree]
"""A function of `(outputs, labels)` of one microbatch, with arrays for results."""


class EvaluateCarry(NamedTuple):
    """Carry of a device from tick to tick.

    Attributes:
        activations: Activations on their way.
        results: What was measured, `[num_microbatches, ...]`.
    """

    activations: TransferBuffers[PyTree]
    results: PyTree


class EvaluateLoop(TickLoop):
    """A forward-only tick program bound to the computing of a model's stages."""

    def run(self, device: Device, measure: Measure) -> PyTree:
        """Run the program and measure each microbatch where the last part is; elsewhere zeros.

        Leaves are `[num_microbatches, ...]`. Where all stages run vocabulary-parallel last layers,
        all of them measure.
        """

        # Traced for shapes alone, so it may name a microbatch that there is not.
        def start() -> PyTree:
            nothing, none = self.stage.activations.zeros(), jnp.int32(-1)
            return self._measure(device, device.batch.microbatch(none, none, none), nothing, measure)

        results = make_ring(jax.eval_shape(start), self.program.num_microbatches)
        carry = EvaluateCarry(activations=self.activations.empty(), results=results)
        return self.scan(device, lambda run, carry, row: self._tick(device, run, carry, row, measure), carry).results

    def _tick(self, device: Device, run: TickRun, carry: EvaluateCarry, row: Row, measure: Measure) -> EvaluateCarry:
        arrived, activations = self.activations.recv(
            carry.activations, run.activation_sends, row.activations, device.stage
        )
        with jax.named_scope("forward"):
            batch = device.batch.microbatch(row.input_microbatch, row.loss_microbatch, row.forward.microbatch)
            if self.stage.vocab_input is not None:
                inputs = self.on_all_stages(
                    run,
                    self.program.tables.input_microbatch,
                    row.input_microbatch,
                    lambda: self.entering(device, row.input_microbatch, train=False),
                )
                batch = dataclasses.replace(batch, inputs=inputs)
            batch = batch.without_key()

            def forward(at: VirtualStage) -> PyTree:
                return self.stage.evaluate(at, device.weights, batch, device.collections, arrived)

            output = self.action(device, run, self.program.tables.forward, row.forward, [forward])
        activations = self.activations.send(
            activations, run.next_activation_sends, row.activations, device.stage, output
        )
        is_last = self.is_last(device, row.forward.chunk)
        if self.stage.vocab_loss is None:
            result = run_or_zeros(jnp.where(is_last, 0, -1), [lambda: self._measure(device, batch, output, measure)])
        else:
            # All stages run these layers at once, and only one of them is in the forward of this microbatch.
            of_loss = dataclasses.replace(batch, context=device.batch.context(row.loss_microbatch))
            result = self.on_all_stages(
                run,
                self.program.tables.loss_microbatch,
                row.loss_microbatch,
                lambda: self._measure(device, of_loss, output, measure),
            )
        # By microbatch, not by tick: a schedule may finish them in any order.
        slot = jnp.where(is_last, row.forward.microbatch, -1)
        return EvaluateCarry(activations, write_ring_if(carry.results, result, slot))

    def _measure(self, device: Device, batch: Microbatch, output: PyTree, measure: Measure) -> PyTree:
        batch = batch.without_key()
        with jax.named_scope("loss"):
            layers, storage = self.stage.vocab_loss, device.weights.storage
            if layers is not None:
                outputs = layers.outputs(storage, output, batch.context)
            else:
                outputs = self.stage.epilogue.outputs(storage, device.collections, output, batch.context)
            return measure(outputs, batch.labels)
