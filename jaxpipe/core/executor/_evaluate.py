"""The evaluation loop: a forward-only tick program that computes outputs or losses of a batch."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.schedules import ActionMode, Actions, TickRun, TransferBuffers

from ._actions import Action, Row, run_action, run_on_all_stages
from ._arrays import Packed, Ring
from ._batch import Microbatch
from ._buffers import make_ring, write_ring_if
from ._stage import Stage
from ._tick_loop import Device, TickLoop
from ._virtual_stage import VirtualStage

Measure = Callable[[PyTree, PyTree], PyTree]
"""A function of `(outputs, labels)` of one microbatch that returns a tree of arrays."""


class EvaluateCarry(NamedTuple):
    """Carry of a device from tick to tick; `results` are `[num_microbatches, ...]`."""

    activations: TransferBuffers[Ring]
    results: PyTree


@dataclass(frozen=True)
class _Forward(Action):
    """The forward of one virtual stage, whose output the tick itself sends."""

    mode: ActionMode
    stage: Stage
    device: Device
    batch: Microbatch
    arrived: Packed

    def now(self, row: Row) -> Actions[jax.Array]:
        return row.forward

    def compute(self, at: VirtualStage, carry: None, row: Row, values: None) -> PyTree:
        device = self.device
        return self.stage.evaluate(at, device.weights, self.batch, device.collections, self.arrived)

    def write(self, carry: None, row: Row, values: None, result: PyTree) -> tuple[None, PyTree]:
        return carry, result


class EvaluateLoop(TickLoop):
    """A forward-only tick program, bound to the computations of a model's stages."""

    def run(self, device: Device, measure: Measure) -> PyTree:
        """Return each microbatch's measurement, `[num_microbatches, ...]`, zero on other stages."""

        # Only traced for shapes, so it may use a microbatch index that does not exist.
        def start() -> PyTree:
            nothing = self.stage.activations.zeros()
            none = jnp.int32(-1)
            return self._measure(
                device, device.batch.microbatch(none, none, none), nothing, measure
            )

        results = make_ring(jax.eval_shape(start), self.program.num_microbatches)
        carry = EvaluateCarry(activations=self.activations.empty(), results=results)
        return self.scan(device, functools.partial(self._tick, measure=measure), carry).results

    def _tick(
        self, device: Device, run: TickRun, carry: EvaluateCarry, row: Row, measure: Measure
    ) -> EvaluateCarry:
        arrived, activations = self.activations.recv(
            carry.activations, run.activation_sends, row.activations, device.stage
        )
        with jax.named_scope("forward"):
            batch = device.batch.microbatch(
                row.input_microbatch, row.loss_microbatch, row.forward.microbatch
            )
            if run.first is not None:
                inputs = run_on_all_stages(
                    run.first,
                    row.input_microbatch,
                    lambda: self.entering(device, row.input_microbatch, train=False),
                )
                batch = dataclasses.replace(batch, inputs=inputs)
            batch = batch.without_key()

            assert run.forward is not None
            action = _Forward(run.forward, self.stage, device, batch, arrived)
            _, output = run_action(action, device.stage, self.stage.placement, None, row)
        activations = self.activations.send(
            activations, run.next_activation_sends, row.activations, device.stage, output
        )
        carry = carry._replace(activations=activations)
        if run.loss is None:
            return carry
        is_last = self.is_last(device, row.forward.chunk)
        index = row.loss_microbatch
        if self.stage.vocab_loss is not None:
            # All stages run these layers together, but only one of them runs the forward of this
            # microbatch in this tick.
            batch = dataclasses.replace(batch, context=device.batch.context(index))
        else:
            index = jnp.where(is_last, index, -1)
        result = run_on_all_stages(
            run.loss, index, lambda: self._measure(device, batch, output, measure)
        )
        # Indexed by microbatch, not by tick: a schedule may finish microbatches in any order.
        slot = jnp.where(is_last, row.forward.microbatch, -1)
        return carry._replace(results=write_ring_if(carry.results, result, slot))

    def _measure(
        self, device: Device, batch: Microbatch, output: Packed, measure: Measure
    ) -> PyTree:
        batch = batch.without_key()
        with jax.named_scope("loss"):
            layers = self.stage.vocab_loss
            storage = device.weights.storage
            if layers is not None:
                outputs = layers.outputs(storage, output, batch.context)
            else:
                outputs = self.stage.epilogue.outputs(
                    storage, device.collections, output, batch.context
                )
            return measure(outputs, batch.labels)
