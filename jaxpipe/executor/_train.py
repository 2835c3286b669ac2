"""The training loop: a tick program that sums the losses and gradients of a batch."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import ActionPlan, Idle, TickProgram, TickRun, TransferBuffers

from ._actions import Action, Row, run_on_all_stages
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
from ._virtual_stage import VirtualStage


class TrainCarry(NamedTuple):
    """Carry of a device from tick to tick; after the last tick, the sums over a batch.

    Attributes:
        activations: Buffers of the activations between stages.
        collections: The stage's collections after the microbatches so far.
        entering: Outputs of the vocabulary-parallel first layers for this tick's forward.
        finished: The previous tick's output for the loss, if losses are delayed.
        gradients: Buffers of the gradients between stages.
        leaving: Gradient of the vocabulary-parallel first layers' outputs, from the previous tick,
            for their backward.
        loss: Sums of `LossTerms.sums` on the stage of the last virtual stage, 0 elsewhere.
        loss_gradients: Gradients of the model's outputs until their backward, in the slots of the
            residuals. Empty if every loss and its backward run in the same tick.
        loss_reported: Summed values that the epilogue reports.
        off_trunk_grads: Summed gradients of the stage's parameters off the trunk.
        pending: Values that split backwards keep for their weight gradients, `[slots, ...]`.
        reported: Summed values that prologues and trunks report, `[num_chunks, n]`.
        residuals: Residuals of forwards until their backwards, `[slots, ...]`.
        trunk_grads: Summed gradients of the trunk, one tree per chunk.
        vocab_grads: Summed gradients of vocabulary-parallel layers, by name.
    """

    activations: TransferBuffers[PyTree]
    collections: PyTree
    entering: PyTree
    finished: PyTree
    gradients: TransferBuffers[PyTree]
    leaving: PyTree
    loss: jax.Array
    loss_gradients: PyTree
    loss_reported: jax.Array
    off_trunk_grads: PyTree
    pending: PyTree
    reported: jax.Array
    residuals: PyTree
    trunk_grads: tuple[PyTree, ...]
    vocab_grads: dict[str, jax.Array]

    @property
    def all_reported(self) -> jax.Array:
        """Summed values that the stage's layers report."""
        return jnp.concatenate([self.reported.reshape(-1), self.loss_reported])


class TrainLoop(TickLoop):
    """A training program, bound to the computations of a model's stages."""

    def __init__(self, stage: Stage, program: TickProgram, *, sends_early: bool) -> None:
        super().__init__(stage, program, sends_early=sends_early)
        # Gradients are always sent at the beginning of the next tick, whose forward overlaps the
        # exchange.
        depth = program.depth.gradients
        unbuffered = program.unbuffered.gradients
        self._gradients = Channel(
            stage.gradients, program.num_stages, depth, unbuffered, sends_early=False
        )
        self._sums = GradientSums(stage, program.num_chunks)

    def run(self, device: Device, num_loss_sums: int) -> TrainCarry:
        """Run the whole program and return the carry after its last tick."""
        stage = self.stage
        program = self.program
        loss_slots = 0 if program.fuses_loss else program.residual_slots
        trunk_grads, off_trunk_grads = self._sums.zeros()
        carry = TrainCarry(
            activations=self.activations.empty(),
            gradients=self._gradients.empty(),
            residuals=self._to_memory(
                make_ring(stage.residuals, program.residual_slots), jax.memory.Space.Host
            ),
            pending=make_ring(stage.pending, program.depth.pending),
            loss_gradients=make_ring(stage.gradients.struct, loss_slots) if loss_slots else (),
            entering=self._first_entering(device),
            leaving=stage.gradients.zeros() if stage.vocab_input else (),
            finished=stage.activations.zeros() if program.delays_loss else (),
            trunk_grads=trunk_grads,
            off_trunk_grads=off_trunk_grads,
            vocab_grads=stage.zero_vocab_grads(),
            loss=jnp.zeros((num_loss_sums,), jnp.float32),
            collections=device.collections,
            reported=jnp.zeros((program.num_chunks, stage.num_reported), jnp.float32),
            loss_reported=jnp.zeros((len(stage.epilogue.aux.names),), jnp.float32),
        )
        carry = self.scan(
            device, lambda run, carry, row: self._tick(device, run, carry, row), carry
        )
        if stage.vocab_input is not None and program.ends_at_input:
            first_stage = stage.placement.locations[0][0]
            index = jnp.int32(program.tables.backward.microbatch[first_stage][-1])
            carry = _plus_vocab(carry, self._vocab_input_gradients(device, index, carry.leaving))
        return carry

    def _first_entering(self, device: Device) -> PyTree:
        """Compute the vocabulary-parallel first layers' outputs for the first tick's forward."""
        if self.stage.vocab_input is None:
            return ()
        return self.entering(
            device, jnp.int32(self.program.tables.input_microbatch[0][0]), train=True
        )

    def _tick(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        inputs = carry.entering
        carry, arrived = self._receive(device, run, carry, row)
        # Outside all actions: idle stages take part too when inputs and labels are gathered from
        # shards.
        labels = device.batch.labels(row.loss_microbatch)
        if self.stage.vocab_input is None:
            inputs = device.batch.inputs(row.input_microbatch)
        else:
            carry = self._vocab_input(device, run, carry, row)
        loss_gradient = self.stage.gradients.zeros()
        gradient = arrived[1]
        if self.program.delays_loss:
            carry, loss_gradient = self._loss(device, run, carry, row, labels, carry.finished)
        if run.forward is not None:
            action = self._forward(device, run, run.forward, labels, loss_gradient)
            values = (inputs, *arrived)
            nothing = (loss_gradient, gradient)
            carry, (loss_gradient, gradient) = self.run_action(
                device, action, carry, row, values, nothing
            )
        # With one virtual stage there is no separate backward: the epilogue is the whole model with
        # the loss.
        if run.backward is not None and self.stage.last:
            with jax.named_scope("backward"):
                action = self._backward(device, run, run.backward)
                carry, _ = self.run_action(device, action, carry, row, (gradient, loss_gradient))
        if run.weight is not None and self.stage.last:
            with jax.named_scope("weight_gradient"):
                carry, _ = self.run_action(device, self._weight(device, run.weight), carry, row)
        return carry

    def _receive(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row
    ) -> tuple[TrainCarry, tuple[PyTree, PyTree]]:
        """Run the tick's exchanges. Returns the activation and the gradient for its actions."""
        activation, activations = self.activations.recv(
            carry.activations, run.activation_sends, row.activations, device.stage
        )
        gradient, gradients = self._gradients.recv(
            carry.gradients, run.gradient_sends, row.gradients, device.stage
        )
        carry = carry._replace(activations=activations, gradients=gradients)
        if run.receives_first:
            activation, gradient = jax.lax.optimization_barrier((activation, gradient))
        return carry, (activation, gradient)

    def _forward(
        self, device: Device, run: TickRun, plan: ActionPlan, labels: PyTree, loss_gradient: PyTree
    ) -> Action:
        """Make the action of a forward and its loss, whose gradient it passes to the backward."""
        stage = self.stage

        def compute(
            at: VirtualStage, carry: TrainCarry, row: Row, values: tuple[PyTree, ...]
        ) -> ForwardResult:
            inputs, arrived, _ = values
            batch = Microbatch(inputs, None, device.batch.context(row.forward.microbatch))
            with jax.named_scope("forward"):
                return stage.forward(at, device.weights, batch, carry.collections, arrived)

        def write(
            carry: TrainCarry, row: Row, values: tuple[PyTree, ...], result: ForwardResult
        ) -> tuple[TrainCarry, tuple[PyTree, PyTree]]:
            output = result.output
            gradient = values[2]
            with jax.named_scope("forward"):
                # An idle forward computes on garbage or returns zeros, and neither may replace the
                # collections.
                collections = select(
                    row.forward.microbatch >= 0, result.collections, carry.collections
                )
                # Idle forwards write too: the program directs them to a slot that is not in use.
                hosted = self._to_memory(result.residuals, jax.memory.Space.Host)
                residuals = write_ring(carry.residuals, hosted, row.residual_write)
                # Idle ticks report zeros, so nothing is added for chunk -1, the last chunk.
                reported = carry.reported.at[row.forward.chunk].add(result.reported)
                if self.sends_early:
                    # Without the barrier XLA merges exchanges of gradients and activations in the
                    # same direction, and then no action overlaps either of them.
                    output, gradient = jax.lax.optimization_barrier((output, gradient))
                activations = self.activations.send(
                    carry.activations,
                    run.next_activation_sends,
                    row.activations,
                    device.stage,
                    output,
                )
            carry = carry._replace(
                activations=activations,
                residuals=residuals,
                collections=collections,
                reported=reported,
            )
            if self.program.delays_loss:
                return carry._replace(finished=output), (loss_gradient, gradient)
            carry, of_output = self._loss(device, run, carry, row, labels, output)
            return carry, (of_output, gradient)

        chunk = (
            (lambda row: jnp.maximum(row.forward.chunk, row.backward.chunk))
            if run.has_one_chunk
            else None
        )
        return Action(plan, lambda row: row.forward, [compute], write, chunk=chunk)

    def _loss(
        self,
        device: Device,
        run: TickRun,
        carry: TrainCarry,
        row: Row,
        labels: PyTree,
        output: PyTree,
    ) -> tuple[TrainCarry, PyTree]:
        """Run the loss. Returns the output's gradient, on the stage of the last virtual stage."""
        if run.loss is None:
            return carry, self.stage.gradients.zeros()
        run_loss = self._epilogue if self.stage.vocab_loss is None else self._vocab_loss
        with jax.named_scope("loss"):
            carry, gradient = run_loss(device, run.loss, carry, row, labels, output)
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
        output: PyTree,
    ) -> tuple[TrainCarry, PyTree]:
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

    def _vocab_loss(
        self,
        device: Device,
        idle: Idle,
        carry: TrainCarry,
        row: Row,
        labels: PyTree,
        output: PyTree,
    ) -> tuple[TrainCarry, PyTree]:
        """Run the last layers and the loss on all stages."""
        layers = self.stage.vocab_loss
        index = row.loss_microbatch
        assert layers is not None
        storage = device.weights.storage
        cotangent = device.cotangents.main
        is_last = (device.stage == self.stage.placement.locations[-1][0]) & (index >= 0)
        batch = Microbatch(None, labels, device.batch.context(index))

        def compute() -> LossResult:
            return layers.loss_and_gradients(storage, is_last, output, batch, cotangent)

        result: LossResult = run_on_all_stages(idle, index, compute)
        carry = _plus_vocab(carry._replace(loss=carry.loss + result.sums), result.grads)
        return carry, result.output_grad

    def _vocab_input(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        """Run the first layers on all stages, forward for the next tick, backward for the last."""
        # No action of this tick needs either, so its matrix products overlap their collectives over
        # the stages.
        leaving = carry.leaving
        last = row.last_input_grad_microbatch
        following = row.next_input_microbatch
        if run.first_backward is not None:

            def gradients() -> dict[str, jax.Array]:
                return self._vocab_input_gradients(device, last, leaving)

            carry = _plus_vocab(carry, run_on_all_stages(run.first_backward, last, gradients))
            # Used once: a tick without a backward leaves zeros.
            carry = carry._replace(leaving=self.stage.gradients.zeros())
        if run.first is not None:

            def outputs() -> PyTree:
                return self.entering(device, following, train=True)

            carry = carry._replace(entering=run_on_all_stages(run.first, following, outputs))
        return carry

    def _vocab_input_gradients(
        self, device: Device, index: jax.Array, gradient: PyTree
    ) -> dict[str, jax.Array]:
        assert self.stage.vocab_input is not None
        inputs = device.batch.inputs(index)
        context = device.batch.context(index)
        return self.stage.vocab_input.gradients(device.weights.storage, inputs, context, gradient)

    def _backward(self, device: Device, run: TickRun, plan: ActionPlan) -> Action:
        """Make the action of a backward, whole or of the input only."""
        stage = self.stage
        kinds = plan.splits

        def compute(
            at: VirtualStage, carry: TrainCarry, row: Row, values: PyTree, *, split: bool
        ) -> Any:
            arrived, loss_gradient = values
            if not self.program.fuses_loss:
                loss_gradient = read_ring(carry.loss_gradients, row.residual_read)
            gradient = select(self.is_last(device, row.backward.chunk), loss_gradient, arrived)
            residuals = self._read_residuals(carry.residuals, row.residual_read)
            reported = device.cotangents.reported
            return stage.backward(at, device.weights, residuals, gradient, reported, split=split)

        def write(
            carry: TrainCarry, row: Row, _: PyTree, result: StageBackwardResult
        ) -> tuple[TrainCarry, None]:
            pending = carry.pending
            outgoing = result.input_grad
            if True in kinds:
                is_always_split = kinds == (True,) and plan.idle in (Idle.NEVER, Idle.LOOP)
                write_slot = write_ring if is_always_split else write_ring_if
                pending = write_slot(pending, result.pending, row.pending_write)
            # No sends: gradients are never sent early.
            gradients = self._gradients.send(
                carry.gradients, {}, row.gradients, device.stage, outgoing
            )
            carry = carry._replace(pending=pending, gradients=gradients)
            carry = self._plus(plan, carry, row.backward.chunk, result.trunk, result.off_trunk)
            if stage.vocab_input is not None:
                # All stages run the first layers' backward, whose psums add the cotangents of all
                # stages, so only one of them may be nonzero.
                leaving = select(
                    self.is_first(device, row.backward.chunk), outgoing, zeros_of(outgoing)
                )
                carry = carry._replace(leaving=leaving)
            return carry, None

        functions = [functools.partial(compute, split=split) for split in kinds]
        if len(functions) > 1:
            whole, split = functions

            def filled(*args: Any) -> StageBackwardResult:
                # All branches of a switch must return the same type, so a split backward's missing
                # gradients become zeros.
                return _fill(split(*args), jax.eval_shape(lambda: whole(*args)))

            functions = [whole, filled]
        which = (
            (lambda row: (row.pending_write >= 0).astype(jnp.int32))
            if len(functions) > 1
            else lambda row: 0
        )
        chunk = (
            (lambda row: jnp.maximum(row.forward.chunk, row.backward.chunk))
            if run.has_one_chunk
            else None
        )
        return Action(plan, lambda row: row.backward, functions, write, which, chunk)

    def _weight(self, device: Device, plan: ActionPlan) -> Action:
        """Make the action of the weight gradient of a split backward."""

        def compute(
            at: VirtualStage, carry: TrainCarry, row: Row, _: PyTree
        ) -> tuple[PyTree, PyTree]:
            residuals = self._read_residuals(carry.residuals, row.weight_residual_read)
            pending = read_ring(carry.pending, row.pending_read)
            # Gathers weights separately, and only those that it reads: the weight gradient of a
            # matrix product does not need the weight.
            return self.stage.backward_weight(at, device.weights, residuals, pending)

        def write(
            carry: TrainCarry, row: Row, _: PyTree, grads: tuple[PyTree, PyTree]
        ) -> tuple[TrainCarry, None]:
            return self._plus(plan, carry, row.weight.chunk, *grads), None

        return Action(plan, lambda row: row.weight, [compute], write)

    def _to_memory(self, residuals: PyTree, space: Any) -> PyTree:
        return to_memory(residuals, self.stage.is_hosted, space)

    def _read_residuals(self, ring: PyTree, slot: jax.Array) -> PyTree:
        return self._to_memory(read_ring(ring, slot), jax.memory.Space.Device)

    def _plus(
        self,
        plan: ActionPlan,
        carry: TrainCarry,
        chunk: jax.Array,
        trunk: PyTree,
        off_trunk: PyTree,
    ) -> TrainCarry:
        """Add an action's gradients to the carry; gradients of the trunk may be None."""
        carry = carry._replace(
            trunk_grads=self._sums.add_trunk(carry.trunk_grads, plan, chunk, trunk)
        )
        if off_trunk is not None and self.stage.prologue.has_params:
            carry = carry._replace(
                off_trunk_grads=self._sums.add_off_trunk(carry.off_trunk_grads, off_trunk)
            )
        return carry


def _plus_vocab(carry: TrainCarry, grads: dict[str, jax.Array]) -> TrainCarry:
    sums = carry.vocab_grads
    added = {name: sums[name] + g.astype(sums[name].dtype) for name, g in grads.items()}
    return carry._replace(vocab_grads=sums | added)


def _fill(split: StageBackwardResult, whole: StageBackwardResult) -> StageBackwardResult:
    """Fill a split backward's result to the structure of a whole backward's, with zeros."""
    leaves, treedef = jax.tree.flatten(whole.trunk)
    pairs = zip(treedef.flatten_up_to(split.trunk), leaves, strict=True)
    trunk = jax.tree.unflatten(treedef, [zeros_of(x) if g is None else g for g, x in pairs])
    off_trunk = zeros_of(whole.off_trunk) if split.off_trunk is None else split.off_trunk
    return split._replace(trunk=trunk, off_trunk=off_trunk)
