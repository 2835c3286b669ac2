"""The vocabulary-parallel layers in the ticks of training: all stages run them together."""

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.schedules import Idle, TickRun

from ._actions import Row, run_on_all_stages
from ._arrays import ByName, Packed
from ._batch import Microbatch
from ._buffers import select, zeros_of
from ._results import LossResult
from ._tick_loop import Device, TickLoop
from ._train_carry import VocabCarry


class VocabEnds:
    """First and last layers of a model, split over the stages, with a carry of their own.

    A model may have either, both or none. In each tick the first layers run forward for the next
    tick and backward for the previous one: no action of the tick needs either, so its matrix
    products overlap their collectives over the stages.
    """

    def __init__(self, loop: TickLoop) -> None:
        self._loop = loop
        self._stage = loop.stage
        self._first = loop.stage.vocab_input
        self._last = loop.stage.vocab_loss

    def begin(self, device: Device) -> VocabCarry:
        """Make the carry before the first tick, whose forward needs the first layers' outputs."""
        stage = self._stage
        if self._first is None:
            return VocabCarry((), (), stage.zero_vocab_grads())
        index = jnp.int32(self._loop.program.tables.input_microbatch[0][0])
        entering = self._loop.entering(device, index, train=True)
        return VocabCarry(entering, stage.gradients.zeros(), stage.zero_vocab_grads())

    def end(self, device: Device, carry: VocabCarry) -> VocabCarry:
        """Run the backward that the last tick has left, if it has."""
        if self._first is None or not self._loop.program.ends_at_input:
            return carry
        first_stage = self._stage.placement.locations[0][0]
        index = jnp.int32(self._loop.program.tables.backward.microbatch[first_stage][-1])
        return self.plus(carry, self._gradients(device, index, carry.leaving))

    def tick(self, device: Device, run: TickRun, carry: VocabCarry, row: Row) -> VocabCarry:
        """Run the first layers, backward for the last tick and forward for the next."""
        if self._first is None:
            return carry
        leaving = carry.leaving
        if run.first_backward is not None:
            last = row.last_input_grad_microbatch
            carry = self.plus(
                carry,
                run_on_all_stages(
                    run.first_backward, last, lambda: self._gradients(device, last, leaving)
                ),
            )
            # Used once: a tick without a backward leaves zeros.
            carry = carry._replace(leaving=self._stage.gradients.zeros())
        if run.first is not None:
            following = row.next_input_microbatch
            entering = run_on_all_stages(
                run.first, following, lambda: self._loop.entering(device, following, train=True)
            )
            carry = carry._replace(entering=entering)
        return carry

    def leave(self, device: Device, carry: VocabCarry, row: Row, gradient: Packed) -> VocabCarry:
        """Keep the gradient of the first virtual stage's input for the next tick."""
        if self._first is None:
            return carry
        is_first = self._loop.is_first(device, row.backward.chunk)
        # All stages run the first layers' backward, whose psums add the cotangents of all stages,
        # so only one of them may be nonzero.
        return carry._replace(leaving=select(is_first, gradient, zeros_of(gradient)))

    def loss(
        self, device: Device, idle: Idle, row: Row, labels: PyTree, output: Packed
    ) -> LossResult:
        """Run the last layers and the loss."""
        layers = self._last
        index = row.loss_microbatch
        assert layers is not None
        storage = device.weights.storage
        cotangent = device.cotangents.main
        is_last = (device.stage == self._stage.placement.locations[-1][0]) & (index >= 0)
        batch = Microbatch(None, labels, device.batch.context(index))

        def compute() -> LossResult:
            return layers.loss_and_gradients(storage, is_last, output, batch, cotangent)

        return run_on_all_stages(idle, index, compute)

    def plus(self, carry: VocabCarry, grads: ByName) -> VocabCarry:
        """Add gradients by name to the sums."""
        sums = carry.grads
        added = {name: sums[name] + g.astype(sums[name].dtype) for name, g in grads.items()}
        return carry._replace(grads=sums | added)

    def _gradients(self, device: Device, index: jax.Array, gradient: Packed) -> ByName:
        assert self._first is not None
        inputs = device.batch.inputs(index)
        context = device.batch.context(index)
        return self._first.gradients(device.weights.storage, inputs, context, gradient)
