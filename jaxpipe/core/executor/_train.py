"""The training loop: a tick program that sums the losses and gradients of a batch."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage
from jaxpipe.schedules import ActionMode, Actions, Idle, TickProgram, TickRun

from ._actions import Action, Compute, Row, run_action
from ._arrays import Packed, Prepared, Residuals
from ._batch import Microbatch
from ._buffers import (
    make_ring,
    read_ring,
    run_or_zeros,
    select,
    to_memory,
    write_ring,
    write_ring_if,
    zeros_of,
)
from ._exchange import Channel
from ._results import ForwardResult, LossResult, StageBackwardResult
from ._stage import Stage
from ._sums import GradientSums
from ._tick_loop import Device, TickLoop
from ._train_carry import TrainCarry
from ._virtual_stage import VirtualStage
from ._vocab_ends import VocabEnds


class ForwardValues(NamedTuple):
    """What a forward reads: the model's inputs, and what arrived in common form.

    The gradient is for the tick's backward; the forward only passes it on.
    """

    inputs: PyTree
    activation: Packed
    gradient: Packed


class Gradients(NamedTuple):
    """Gradients for a tick's backward: of the loss of this tick's forward, and the one arrived."""

    of_loss: Packed
    arrived: Packed


class TrainLoop(TickLoop):
    """A training program, bound to the computations of a model's stages."""

    def __init__(self, stage: Stage, program: TickProgram, *, sends_early: bool) -> None:
        super().__init__(stage, program, sends_early=sends_early)
        # Gradients are always sent at the beginning of the next tick, whose forward overlaps the
        # exchange.
        self.gradients = Channel(
            stage.gradients,
            program.num_stages,
            program.depth.gradients,
            program.unbuffered.gradients,
            sends_early=False,
        )
        self.vocab = VocabEnds(self)
        self._sums = GradientSums(stage, program.num_chunks)

    def run(self, device: Device, num_loss_sums: int) -> TrainCarry:
        """Run the whole program and return the carry after its last tick."""
        stage = self.stage
        program = self.program
        loss_slots = 0 if program.fuses_loss else program.residual_slots
        trunk_grads, off_trunk_grads = self._sums.zeros()
        carry = TrainCarry(
            activations=self.activations.empty(),
            gradients=self.gradients.empty(),
            residuals=self.to_host(make_ring(stage.residuals, program.residual_slots)),
            pending=make_ring(stage.pending, program.depth.pending),
            loss_gradients=make_ring(stage.gradients.struct, loss_slots) if loss_slots else (),
            vocab=self.vocab.begin(device),
            finished=stage.activations.zeros() if program.delays_loss else (),
            trunk_grads=trunk_grads,
            off_trunk_grads=off_trunk_grads,
            loss=jnp.zeros((num_loss_sums,), jnp.float32),
            collections=device.collections,
            reported=jnp.zeros((program.num_chunks, stage.num_reported), jnp.float32),
            loss_reported=jnp.zeros((len(stage.epilogue.aux.names),), jnp.float32),
        )
        carry = self.scan(device, self._tick, carry)
        return carry._replace(vocab=self.vocab.end(device, carry.vocab))

    def _tick(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        inputs = carry.vocab.entering
        stage = device.stage
        placement = self.stage.placement
        carry, activation, gradient = self._receive(device, run, carry, row)
        # Outside all actions: idle stages take part too when inputs and labels are gathered from
        # shards.
        labels = device.batch.labels(row.loss_microbatch)
        if self.stage.vocab_input is None:
            inputs = device.batch.inputs(row.input_microbatch)
        carry = carry._replace(vocab=self.vocab.tick(device, run, carry.vocab, row))
        gradients = Gradients(self.stage.gradients.zeros(), gradient)
        if self.program.delays_loss:
            carry, of_loss = self.loss(device, run, carry, row, labels, carry.finished)
            gradients = gradients._replace(of_loss=of_loss)
        if run.forward is not None:
            forward = Forward(run.forward, self, device, run, labels, gradients.of_loss)
            values = ForwardValues(inputs, activation, gradient)
            carry, gradients = run_action(forward, stage, placement, carry, row, values, gradients)
        # With one virtual stage there is no separate backward: the epilogue is the whole model with
        # the loss.
        if run.backward is not None and self.stage.last:
            with jax.named_scope("backward"):
                backward = Backward(run.backward, self, device, run)
                carry, _ = run_action(backward, stage, placement, carry, row, gradients)
        if run.weight is not None and self.stage.last:
            with jax.named_scope("weight_gradient"):
                weight = Weight(run.weight, self, device)
                carry, _ = run_action(weight, stage, placement, carry, row)
        return carry

    def _receive(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row
    ) -> tuple[TrainCarry, Packed, Packed]:
        """Run the tick's exchanges. Returns the activation and the gradient for its actions."""
        activation, activations = self.activations.recv(
            carry.activations, run.activation_sends, row.activations, device.stage
        )
        gradient, gradients = self.gradients.recv(
            carry.gradients, run.gradient_sends, row.gradients, device.stage
        )
        carry = carry._replace(activations=activations, gradients=gradients)
        if run.receives_first:
            activation, gradient = jax.lax.optimization_barrier((activation, gradient))
        return carry, activation, gradient

    def loss(
        self,
        device: Device,
        run: TickRun,
        carry: TrainCarry,
        row: Row,
        labels: PyTree,
        output: Packed,
    ) -> tuple[TrainCarry, Packed]:
        """Run the loss. Returns the output's gradient, on the stage of the last virtual stage."""
        if run.loss is None:
            return carry, self.stage.gradients.zeros()
        with jax.named_scope("loss"):
            if self.stage.vocab_loss is None:
                carry, gradient = self._epilogue(device, run.loss, carry, row, labels, output)
            else:
                result = self.vocab.loss(device, run.loss, row, labels, output)
                carry = carry._replace(loss=carry.loss + result.sums)
                carry = carry._replace(vocab=self.vocab.plus(carry.vocab, result.grads))
                gradient = result.output_grad
        if self.program.fuses_loss:
            return carry, gradient
        ring = write_ring_if(carry.loss_gradients, gradient, row.loss_gradient_write)
        return carry._replace(loss_gradients=ring), gradient

    def _epilogue(
        self,
        device: Device,
        idle: Idle,
        carry: TrainCarry,
        row: Row,
        labels: PyTree,
        output: Packed,
    ) -> tuple[TrainCarry, Packed]:
        """Run the epilogue on the stage of the last virtual stage."""
        stage = self.stage
        storage = device.weights.storage
        collections = carry.collections
        is_last = self.is_last(device, row.forward.chunk)
        batch = Microbatch(None, labels, device.batch.context(row.loss_microbatch))

        def compute() -> LossResult:
            return stage.epilogue.loss_and_gradients(
                storage, collections, output, batch, device.cotangents
            )

        result = (
            compute() if idle is Idle.NEVER else run_or_zeros(jnp.where(is_last, 0, -1), [compute])
        )
        carry = carry._replace(
            loss_reported=carry.loss_reported + result.reported,
            loss=carry.loss + result.sums,
            collections=select(is_last, result.collections, collections),
            off_trunk_grads=self._sums.add_off_trunk(carry.off_trunk_grads, result.grads),
        )
        return carry, result.output_grad

    def to_host(self, residuals: Residuals) -> Residuals:
        """Move the residuals that are offloaded into host memory."""
        return to_memory(residuals, self.stage.is_hosted, jax.memory.Space.Host)

    def read_residuals(self, carry: TrainCarry, slot: jax.Array) -> Residuals:
        """Return the residuals in a slot, in device memory."""
        residuals = read_ring(carry.residuals, slot)
        return to_memory(residuals, self.stage.is_hosted, jax.memory.Space.Device)

    def plus(
        self,
        mode: ActionMode,
        carry: TrainCarry,
        chunk: jax.Array,
        trunk: Prepared,
        off_trunk: Storage | None,
    ) -> TrainCarry:
        """Add an action's gradients to the carry; gradients of the trunk may be None."""
        carry = carry._replace(
            trunk_grads=self._sums.add_trunk(carry.trunk_grads, mode, chunk, trunk)
        )
        if off_trunk is not None and self.stage.prologue.has_params:
            carry = carry._replace(
                off_trunk_grads=self._sums.add_off_trunk(carry.off_trunk_grads, off_trunk)
            )
        return carry


@dataclass(frozen=True)
class Forward(Action):
    """A forward and its loss, whose gradient it hands to the tick's backward.

    `labels` are those of the tick's loss. `loss_gradient` is the gradient of a delayed loss, which
    has run before.
    """

    mode: ActionMode
    loop: TrainLoop
    device: Device
    run: TickRun
    labels: PyTree
    loss_gradient: Packed

    def now(self, row: Row) -> Actions[jax.Array]:
        return row.forward

    def chunk(self, row: Row) -> jax.Array:
        return _either_chunk(row) if self.run.has_one_chunk else row.forward.chunk

    def compute(
        self, at: VirtualStage, carry: TrainCarry, row: Row, values: ForwardValues
    ) -> ForwardResult:
        device = self.device
        batch = Microbatch(values.inputs, None, device.batch.context(row.forward.microbatch))
        with jax.named_scope("forward"):
            return self.loop.stage.forward(
                at, device.weights, batch, carry.collections, values.activation
            )

    def write(
        self, carry: TrainCarry, row: Row, values: ForwardValues, result: ForwardResult
    ) -> tuple[TrainCarry, Gradients]:
        loop = self.loop
        output = result.output
        arrived = values.gradient
        with jax.named_scope("forward"):
            # An idle forward computes on garbage or returns zeros, and neither may replace the
            # collections.
            collections = select(row.forward.microbatch >= 0, result.collections, carry.collections)
            # Idle forwards write too: the program directs them to a slot that is not in use.
            residuals = write_ring(
                carry.residuals, loop.to_host(result.residuals), row.residual_write
            )
            # Idle ticks report zeros, so nothing is added for chunk -1, the last chunk.
            reported = carry.reported.at[row.forward.chunk].add(result.reported)
            if loop.sends_early:
                # Without the barrier XLA merges exchanges of gradients and activations in the same
                # direction, and then no action overlaps either of them.
                output, arrived = jax.lax.optimization_barrier((output, arrived))
            activations = loop.activations.send(
                carry.activations,
                self.run.next_activation_sends,
                row.activations,
                self.device.stage,
                output,
            )
        carry = carry._replace(
            activations=activations,
            residuals=residuals,
            collections=collections,
            reported=reported,
        )
        if loop.program.delays_loss:
            return carry._replace(finished=output), Gradients(self.loss_gradient, arrived)
        carry, of_loss = loop.loss(self.device, self.run, carry, row, self.labels, output)
        return carry, Gradients(of_loss, arrived)


@dataclass(frozen=True)
class Backward(Action):
    """A backward, whole or of the input only, as the kinds of its mode say."""

    mode: ActionMode
    loop: TrainLoop
    device: Device
    run: TickRun

    def now(self, row: Row) -> Actions[jax.Array]:
        return row.backward

    def chunk(self, row: Row) -> jax.Array:
        return _either_chunk(row) if self.run.has_one_chunk else row.backward.chunk

    def which(self, row: Row) -> jax.Array | int:
        return (row.pending_write >= 0).astype(jnp.int32) if len(self.mode.splits) > 1 else 0

    @property
    def functions(self) -> Sequence[Compute]:
        functions = [functools.partial(self.compute, split=split) for split in self.mode.splits]
        if len(functions) == 1:
            return functions
        whole, split = functions

        def filled(*args: Any) -> StageBackwardResult:
            # All branches of a switch must return the same type, so a split backward's missing
            # gradients become zeros.
            return _fill(split(*args), jax.eval_shape(lambda: whole(*args)))

        return [whole, filled]

    def compute(
        self,
        at: VirtualStage,
        carry: TrainCarry,
        row: Row,
        values: Gradients,
        *,
        split: bool = False,
    ) -> StageBackwardResult:
        loop = self.loop
        device = self.device
        of_loss = values.of_loss
        if not loop.program.fuses_loss:
            of_loss = read_ring(carry.loss_gradients, row.residual_read)
        is_last = loop.is_last(device, row.backward.chunk)
        gradient = select(is_last, of_loss, values.arrived)
        residuals = loop.read_residuals(carry, row.residual_read)
        reported = device.cotangents.reported
        return loop.stage.backward(at, device.weights, residuals, gradient, reported, split=split)

    def write(
        self, carry: TrainCarry, row: Row, values: Gradients, result: StageBackwardResult
    ) -> tuple[TrainCarry, None]:
        loop = self.loop
        mode = self.mode
        pending = carry.pending
        outgoing = result.input_grad
        if True in mode.splits:
            is_always_split = mode.splits == (True,) and mode.idle in (Idle.NEVER, Idle.LOOP)
            write_slot = write_ring if is_always_split else write_ring_if
            pending = write_slot(pending, result.pending, row.pending_write)
        # No sends: gradients are never sent early.
        gradients = loop.gradients.send(
            carry.gradients, {}, row.gradients, self.device.stage, outgoing
        )
        carry = carry._replace(pending=pending, gradients=gradients)
        carry = loop.plus(mode, carry, row.backward.chunk, result.trunk, result.off_trunk)
        vocab = loop.vocab.leave(self.device, carry.vocab, row, outgoing)
        return carry._replace(vocab=vocab), None


@dataclass(frozen=True)
class Weight(Action):
    """The weight gradient of a split backward."""

    mode: ActionMode
    loop: TrainLoop
    device: Device

    def now(self, row: Row) -> Actions[jax.Array]:
        return row.weight

    def compute(
        self, at: VirtualStage, carry: TrainCarry, row: Row, values: None
    ) -> tuple[Prepared, Storage | None]:
        loop = self.loop
        residuals = loop.read_residuals(carry, row.weight_residual_read)
        pending = read_ring(carry.pending, row.pending_read)
        # Gathers weights separately, and only those that it reads: the weight gradient of a matrix
        # product does not need the weight.
        return loop.stage.backward_weight(at, self.device.weights, residuals, pending)

    def write(
        self, carry: TrainCarry, row: Row, values: None, result: tuple[Prepared, Storage | None]
    ) -> tuple[TrainCarry, None]:
        return self.loop.plus(self.mode, carry, row.weight.chunk, *result), None


def _either_chunk(row: Row) -> jax.Array:
    """The chunk of a tick whose forward and backward work on the same one, or are idle."""
    return jnp.maximum(row.forward.chunk, row.backward.chunk)


def _fill(split: StageBackwardResult, whole: StageBackwardResult) -> StageBackwardResult:
    """Fill a split backward's result to the structure of a whole backward's, with zeros."""
    leaves, treedef = jax.tree.flatten(whole.trunk)
    pairs = zip(treedef.flatten_up_to(split.trunk), leaves, strict=True)
    trunk = jax.tree.unflatten(treedef, [zeros_of(x) if g is None else g for g, x in pairs])
    off_trunk = zeros_of(whole.off_trunk) if split.off_trunk is None else split.off_trunk
    return split._replace(trunk=trunk, off_trunk=off_trunk)
