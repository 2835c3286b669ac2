"""The training loop: a tick program run by every device, from a batch to summed losses and gradients."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Actions, Table, TickProgram, TickRun, TransferBuffers

from ._batch import Microbatch
from ._buffers import make_ring, once, read_ring, run_or_zeros, select, to_memory, write_ring, write_ring_if, zeros_of
from ._exchange import Channel
from ._results import ForwardResult, LossResult, StageBackwardResult
from ._stage import Stage
from ._sums import GradientSums
from ._tick_loop import Device, Row, TickLoop, is_never_idle, occurs
from ._virtual_stage import VirtualStage


class TrainCarry(NamedTuple):
    """Carry of a device from tick to tick; after the last one, its sums over the microbatches of a batch.

    Attributes:
        activations: Activations on their way.
        collections: The stage's collections after the microbatches so far.
        entering: What vocabulary-parallel first layers have made for this tick's forward.
        finished: The output that the tick before has left for the loss, where losses are delayed.
        gradients: Gradients on their way.
        leaving: The gradient of what vocabulary-parallel first layers made, which the tick before
            has left for their backward.
        loss: Sums of what the loss gives (`LossTerms.sums`), on the stage of the last part, else 0.
        loss_gradients: Gradients of the model's output that wait for their backward, in the slots of
            the residuals; empty where every loss is followed by its backward in the same tick.
        loss_reported: Summed values that the epilogue reports.
        off_trunk_grads: Summed gradients of the stage's parameters off the trunk.
        pending: What split backwards left for their weight gradients, `[slots, ...]`.
        reported: Summed values that prologues and trunks report, `[num_chunks, n]`.
        residuals: What forwards left for their backwards, `[slots, ...]`.
        trunk_grads: Summed gradients of the trunk, a tree for each chunk.
        vocab_grads: Those of vocabulary-parallel layers, by name.
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
    """A training program bound to the computing of a model's stages.

    Args:
        stage: The computing.
        program: The lowered training schedule.
        skip_idle: Branch around idle actions, and on the chunk; otherwise idle actions compute and the result is
            dropped.
        sends_early: Send activations at the end of the tick that computes them, not at the beginning of the next.
        loops_idle: Where idle actions are skipped, call actions in loops of one round or none.
    """

    def __init__(
        self, stage: Stage, program: TickProgram, *, skip_idle: bool, sends_early: bool, loops_idle: bool
    ) -> None:
        super().__init__(stage, program, skip_idle=skip_idle, sends_early=sends_early)
        # On GPU the host waits twice for a loop, and once for a branch. All stages must take part in exchanges, and in
        # what vocabulary-parallel layers sum.
        has_exchanges = sends_early or stage.vocab_input is not None or stage.vocab_loss is not None
        self.loops_actions = loops_idle and skip_idle and not has_exchanges
        # Gradients always leave at the beginning of the next tick, where its forward hides the exchange.
        depth, unbuffered = program.depth.gradients, program.unbuffered.gradients
        self._gradients = Channel(stage.gradients, program.num_stages, depth, unbuffered, sends_early=False)
        self._sums = GradientSums(stage, program)
        self._has_fused_loss = _loss_is_followed_by_backward(program, stage)

    def run(self, device: Device, num_loss_sums: int) -> TrainCarry:
        """Run the whole program; gives the carry after its last tick, with so many sums of the loss."""
        stage, program = self.stage, self.program
        loss_slots = 0 if self._has_fused_loss else program.residual_slots
        trunk_grads, off_trunk_grads = self._sums.zeros()
        carry = TrainCarry(
            activations=self.activations.empty(),
            gradients=self._gradients.empty(),
            residuals=self._to_memory(make_ring(stage.residuals, program.residual_slots), jax.memory.Space.Host),
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
        carry = self.scan(device, lambda run, carry, row: self._tick(device, run, carry, row), carry)
        (first_stage, first_chunk), backward = stage.placement.locations[0], program.tables.backward
        if stage.vocab_input is not None and backward.chunk[first_stage][-1] == first_chunk:
            index = jnp.int32(backward.microbatch[first_stage][-1])
            carry = _plus_vocab(carry, self._vocab_input_gradients(device, index, carry.leaving))
        return carry

    def _first_entering(self, device: Device) -> PyTree:
        """What the first tick's forward takes of vocabulary-parallel first layers."""
        if self.stage.vocab_input is None:
            return ()
        return self.entering(device, jnp.int32(self.program.tables.input_microbatch[0][0]), train=True)

    def _tick(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        inputs, tables = carry.entering, self.program.tables
        carry, arrived = self._receive(device, run, carry, row)
        # Out of all actions: idle stages, too, take part where inputs and labels are gathered from shares.
        labels = device.batch.labels(row.loss_microbatch)
        if self.stage.vocab_input is None:
            inputs = device.batch.inputs(row.input_microbatch)
        else:
            carry = self._vocab_input(device, run, carry, row)
        loss_gradient, gradient = self.stage.gradients.zeros(), arrived[1]
        if self.program.delays_loss:
            carry, loss_gradient = self._loss(device, run, carry, row, labels, carry.finished)
        if run.has_forward:

            def forward(carry: TrainCarry, row: Row, taken: tuple[PyTree, ...]) -> Any:
                carry, output, gradient = self._forward(device, run, carry, row, *taken)
                if self.program.delays_loss:
                    return carry._replace(finished=output), (loss_gradient, gradient)
                carry, of_output = self._loss(device, run, carry, row, labels, output)
                return carry, (of_output, gradient)

            is_busy, nothing = row.forward.microbatch >= 0, (loss_gradient, gradient)
            carry, (loss_gradient, gradient) = self._unless_idle(
                run, tables.forward, is_busy, forward, carry, row, (inputs, *arrived), nothing
            )
        # A model of one virtual stage has no backward of its own: its epilogue is the whole model, with the loss.
        if run.has_backward and self.stage.last:

            def backward(carry: TrainCarry, row: Row, arrived: tuple[PyTree, PyTree]) -> Any:
                return self._backward(device, run, carry, row, *arrived), None

            is_busy, values = row.backward.microbatch >= 0, (gradient, loss_gradient)
            with jax.named_scope("backward"):
                carry, _ = self._unless_idle(run, tables.backward, is_busy, backward, carry, row, values)
        if run.has_weight and self.stage.last:

            def weight(carry: TrainCarry, row: Row, _: None) -> Any:
                return self._weight(device, run, carry, row), None

            is_busy = row.weight.microbatch >= 0
            with jax.named_scope("weight_gradient"):
                carry, _ = self._unless_idle(run, tables.weight, is_busy, weight, carry, row)
        return carry

    def _receive(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row
    ) -> tuple[TrainCarry, tuple[PyTree, PyTree]]:
        """Do the tick's exchanges; gives the activation and the gradient that its actions take."""
        activation, activations = self.activations.recv(
            carry.activations, run.activation_sends, row.activations, device.stage
        )
        gradient, gradients = self._gradients.recv(carry.gradients, run.gradient_sends, row.gradients, device.stage)
        carry = carry._replace(activations=activations, gradients=gradients)
        if self.stage.vocab_loss is not None and self.skip_idle and len(run.activation_sends) > 1:
            # Before the forward: else XLA (JAX 0.10) puts the exchange of gradients after the loss, whose collectives
            # lie in no other exchange, and a stage that has a backward waits for its neighbours' forwards.
            activation, gradient = jax.lax.optimization_barrier((activation, gradient))
        return carry, (activation, gradient)

    def _unless_idle(
        self,
        run: TickRun,
        actions: Actions[Table],
        is_busy: jax.Array,
        act: Callable[[TrainCarry, Row, Any], tuple[TrainCarry, Any]],
        carry: TrainCarry,
        row: Row,
        values: PyTree = None,
        nothing: PyTree = None,
    ) -> tuple[TrainCarry, Any]:
        """The carry after an action and what it gives, in a loop `nothing` where it is idle.

        On CPU this is a loop of one round, or of none where the action is idle: then it costs
        nothing. A branch would make zeros of all that the action gives, which are then written to
        the rings and added to the sums. `act` reads nothing that changes but its arguments.
        """
        if not self.loops_actions or is_never_idle(actions, run):
            return act(carry, row, values)

        def one_round(number: jax.Array, before: tuple[TrainCarry, PyTree]) -> tuple[TrainCarry, PyTree]:
            # What does not depend on the loop's own state XLA moves in front of it, where idle actions run it too. Of
            # entries behind a barrier all would be held, tick by tick; a zero is added to those that are read.
            read, zero, _ = jax.lax.optimization_barrier((values, jnp.int32(0), number))
            return act(before[0], jax.tree.map(lambda entry: entry + zero, row), read)

        return once(is_busy, one_round, (carry, nothing))

    def _forward(
        self,
        device: Device,
        run: TickRun,
        carry: TrainCarry,
        row: Row,
        inputs: PyTree,
        arrived: PyTree,
        gradient: PyTree,
    ) -> tuple[TrainCarry, PyTree, PyTree]:
        """Run the forward; gives its output, and the gradient that arrived."""
        stage, collections = self.stage, carry.collections
        with jax.named_scope("forward"):
            batch = Microbatch(inputs, None, device.batch.context(row.forward.microbatch))

            def forward(at: VirtualStage) -> ForwardResult:
                return stage.forward(at, device.weights, batch, collections, arrived)

            actions, chunk = self.program.tables.forward, self._common_chunk(run, row)
            result = self.action(device, run, actions, row.forward, [forward], chunk=chunk)
            # An idle forward may have computed on garbage, or given zeros: neither may replace collections.
            updated = select(row.forward.microbatch >= 0, result.collections, collections)
            # Also where the forward was idle: the program names a slot that nothing living uses.
            hosted = self._to_memory(result.residuals, jax.memory.Space.Host)
            ring = write_ring(carry.residuals, hosted, row.residual_write)
        # Idle ticks report zeros, so chunk -1, which counts from the end, adds nothing.
        reported, output = carry.reported.at[row.forward.chunk].add(result.reported), result.output
        if self.sends_early:
            # Without the barrier XLA merges exchanges of gradients and activations in one direction, and neither of
            # them lies under an action any more.
            output, gradient = jax.lax.optimization_barrier((output, gradient))
        activations = self.activations.send(
            carry.activations, run.next_activation_sends, row.activations, device.stage, output
        )
        carry = carry._replace(
            activations=activations,
            residuals=ring,
            collections=updated,
            reported=reported,
        )
        return carry, output, gradient

    def _loss(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row, labels: PyTree, output: PyTree
    ) -> tuple[TrainCarry, PyTree]:
        """Run the loss; gives the gradient of the output where the last part is."""
        if not occurs(self.program.tables.loss_microbatch, run):
            return carry, self.stage.gradients.zeros()
        run_loss = self._epilogue if self.stage.vocab_loss is None else self._vocab_loss
        with jax.named_scope("loss"):
            carry, gradient = run_loss(device, run, carry, row, labels, output)
        if self._has_fused_loss:
            return carry, gradient
        ring = write_ring_if(carry.loss_gradients, gradient, row.loss_gradient_write)
        return carry._replace(loss_gradients=ring), gradient

    def _epilogue(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row, labels: PyTree, output: PyTree
    ) -> tuple[TrainCarry, PyTree]:
        """Run the epilogue where the last part is."""
        stage, storage, collections = self.stage, device.weights.storage, carry.collections
        is_last = self.is_last(device, row.forward.chunk)
        batch = Microbatch(None, labels, device.batch.context(row.loss_microbatch))

        def compute() -> LossResult:
            return stage.epilogue.loss_and_gradients(storage, collections, output, batch, device.cotangents)

        # One device computing every tick needs no branch around the loss; else only the last stage has it.
        if stage.last == 0 and is_never_idle(self.program.tables.forward, run):
            result = compute()
        else:
            result = run_or_zeros(jnp.where(is_last, 0, -1), [compute])
        carry = carry._replace(
            loss_reported=carry.loss_reported + result.reported,
            loss=carry.loss + result.sums,
            collections=select(is_last, result.collections, collections),
            off_trunk_grads=self._sums.add_off_trunk(carry.off_trunk_grads, result.grads),
        )
        return carry, result.output_grad

    def _vocab_loss(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row, labels: PyTree, output: PyTree
    ) -> tuple[TrainCarry, PyTree]:
        """Run the last layers and the loss on all stages."""
        layers, index = self.stage.vocab_loss, row.loss_microbatch
        assert layers is not None
        storage, cotangent = device.weights.storage, device.cotangents.main
        is_last = (device.stage == self.stage.placement.locations[-1][0]) & (index >= 0)
        batch = Microbatch(None, labels, device.batch.context(index))

        def compute() -> LossResult:
            return layers.loss_and_gradients(storage, is_last, output, batch, cotangent)

        microbatches = self.program.tables.loss_microbatch
        result: LossResult = self.on_all_stages(run, microbatches, index, compute)
        carry = _plus_vocab(carry._replace(loss=carry.loss + result.sums), result.grads)
        return carry, result.output_grad

    def _vocab_input(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        """Run the first layers on all stages: their forward for the next tick, their backward for the last one.

        No action of this tick needs either, so that their collectives over the stages travel under its products.
        """
        tables, leaving = self.program.tables, carry.leaving
        last, following = row.last_input_grad_microbatch, row.next_input_microbatch
        if occurs(tables.last_input_grad_microbatch, run):

            def gradients() -> dict[str, jax.Array]:
                return self._vocab_input_gradients(device, last, leaving)

            table = tables.last_input_grad_microbatch
            carry = _plus_vocab(carry, self.on_all_stages(run, table, last, gradients, is_harmless=True))
            # Taken once: a tick without a backward leaves nothing.
            carry = carry._replace(leaving=self.stage.gradients.zeros())
        if occurs(tables.next_input_microbatch, run):

            def outputs() -> PyTree:
                return self.entering(device, following, train=True)

            table = tables.next_input_microbatch
            entering = self.on_all_stages(run, table, following, outputs, is_harmless=True)
            carry = carry._replace(entering=entering)
        return carry

    def _vocab_input_gradients(self, device: Device, index: jax.Array, gradient: PyTree) -> dict[str, jax.Array]:
        assert self.stage.vocab_input is not None
        inputs, context = device.batch.inputs(index), device.batch.context(index)
        return self.stage.vocab_input.gradients(device.weights.storage, inputs, context, gradient)

    def _backward(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row, arrived: PyTree, loss_gradient: PyTree
    ) -> TrainCarry:
        """Run the backward, whole or of the input alone."""
        stage = self.stage
        if not self._has_fused_loss:
            loss_gradient = read_ring(carry.loss_gradients, row.residual_read)
        gradient = select(self.is_last(device, row.backward.chunk), loss_gradient, arrived)
        carry, result = self._gradients_of(device, run, carry, row, gradient)
        outgoing = result.input_grad
        # No sends are named: gradients never leave early.
        gradients = self._gradients.send(carry.gradients, {}, row.gradients, device.stage, outgoing)
        actions, chunk = self.program.tables.backward, row.backward.chunk
        carry = carry._replace(gradients=gradients)
        carry = self._plus(run, actions, carry, chunk, result.trunk, result.off_trunk)
        if stage.vocab_input is not None:
            # All stages run their backward, and its psums add the cotangents up: only one may be other than zero.
            leaving = select(self.is_first(device, row.backward.chunk), outgoing, zeros_of(outgoing))
            carry = carry._replace(leaving=leaving)
        return carry

    def _gradients_of(
        self, device: Device, run: TickRun, carry: TrainCarry, row: Row, gradient: PyTree
    ) -> tuple[TrainCarry, StageBackwardResult]:
        """Run the backward's action; what is pending is in its ring."""
        stage, ring, kinds = self.stage, carry.residuals, self._kinds_of_backward(run)

        def backward(at: VirtualStage, *, split: bool) -> StageBackwardResult:
            residuals = self._read_residuals(ring, row.residual_read)
            reported = device.cotangents.reported
            return stage.backward(at, device.weights, residuals, gradient, reported, split=split)

        functions: list[Callable[[VirtualStage], StageBackwardResult]] = [
            functools.partial(backward, split=split) for split in kinds
        ]
        which: jax.Array | int = 0
        if len(functions) > 1:
            whole, split = functions
            # Branches of one switch must return one type: a split backward's missing gradients become zeros.
            functions[1] = lambda at: _fill(split(at), jax.eval_shape(lambda: whole(at)))
            which = (row.pending_write >= 0).astype(jnp.int32)

        actions, chunk = self.program.tables.backward, self._common_chunk(run, row)
        result = self.action(device, run, actions, row.backward, functions, which, chunk)
        pending = carry.pending
        if True in kinds:
            is_always_split = kinds == [True] and (self.loops_actions or is_never_idle(actions, run))
            write = write_ring if is_always_split else write_ring_if
            pending = write(pending, result.pending, row.pending_write)
        return carry._replace(pending=pending), result

    def _weight(self, device: Device, run: TickRun, carry: TrainCarry, row: Row) -> TrainCarry:
        """Run the weight gradient of a split backward."""
        stage, residual_ring, pending_ring = self.stage, carry.residuals, carry.pending

        def weight(at: VirtualStage) -> tuple[PyTree, PyTree]:
            residuals = self._read_residuals(residual_ring, row.weight_residual_read)
            # Gathered by itself, and only what it reads: a product's weight gradient needs no weight.
            return stage.backward_weight(at, device.weights, residuals, read_ring(pending_ring, row.pending_read))

        actions, chunk = self.program.tables.weight, row.weight.chunk
        trunk, off_trunk = self.action(device, run, actions, row.weight, [weight])
        return self._plus(run, actions, carry, chunk, trunk, off_trunk)

    def _common_chunk(self, run: TickRun, row: Row) -> jax.Array | None:
        """The chunk of a tick's forward and backward; None where some tick of the run has them for different ones.

        With one index for both XLA takes the chunk's weights out of those of all once in a tick, not twice.
        """
        if not self.program.is_of_one_chunk(run.start, run.stop):
            return None
        return jnp.maximum(row.forward.chunk, row.backward.chunk)

    def _kinds_of_backward(self, run: TickRun) -> list[bool]:
        """True if the backwards of a run are split; both where there are such and such, whole ones first."""
        tables, ticks = self.program.tables, slice(run.start, run.stop)
        found = {
            slot >= 0
            for slots, chunks in zip(tables.pending_write, tables.backward.chunk, strict=True)
            for slot, chunk in zip(slots[ticks], chunks[ticks], strict=True)
            if chunk >= 0
        }
        return sorted(found)

    def _to_memory(self, residuals: PyTree, space: Any) -> PyTree:
        return to_memory(residuals, self.stage.is_hosted, space)

    def _read_residuals(self, ring: PyTree, slot: jax.Array) -> PyTree:
        return self._to_memory(read_ring(ring, slot), jax.memory.Space.Device)

    def _plus(
        self,
        run: TickRun,
        actions: Actions[Table],
        carry: TrainCarry,
        chunk: jax.Array,
        trunk: PyTree,
        off_trunk: PyTree,
    ) -> TrainCarry:
        """The carry with an action's gradients; those of the trunk may be None leaf by leaf."""
        trunk_sums = self._sums.add_trunk(carry.trunk_grads, run, actions, chunk, trunk)
        carry = carry._replace(trunk_grads=trunk_sums)
        if off_trunk is not None and self.stage.prologue.has_params:
            carry = carry._replace(off_trunk_grads=self._sums.add_off_trunk(carry.off_trunk_grads, off_trunk))
        return carry


def _loss_is_followed_by_backward(program: TickProgram, stage: Stage) -> bool:
    """True if every loss is followed by its backward in the same tick, so that its gradient need not wait."""
    last_stage, last_chunk = stage.placement.locations[-1]
    backward = program.tables.backward
    ticks = zip(
        program.tables.loss_microbatch[0], backward.microbatch[last_stage], backward.chunk[last_stage], strict=True
    )
    return all(loss == microbatch for loss, microbatch, chunk in ticks if chunk == last_chunk)


def _plus_vocab(carry: TrainCarry, grads: dict[str, jax.Array]) -> TrainCarry:
    sums = carry.vocab_grads
    added = {name: sums[name] + g.astype(sums[name].dtype) for name, g in grads.items()}
    return carry._replace(vocab_grads=sums | added)


def _fill(split: StageBackwardResult, whole: StageBackwardResult) -> StageBackwardResult:
    """A split backward's result in the form of a whole one's: zeros for the gradients that it leaves for later."""
    leaves, treedef = jax.tree.flatten(whole.trunk)
    pairs = zip(treedef.flatten_up_to(split.trunk), leaves, strict=True)
    trunk = jax.tree.unflatten(treedef, [zeros_of(x) if g is None else g for g, x in pairs])
    off_trunk = zeros_of(whole.off_trunk) if split.off_trunk is None else split.off_trunk
    return split._replace(trunk=trunk, off_trunk=off_trunk)
