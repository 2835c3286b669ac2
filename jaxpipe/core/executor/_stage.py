"""Computes a stage's chunks: prologue, trunk, epilogue and vocabulary-parallel layers."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import (
    ModelCollections,
    ModelParams,
    Storage,
    constrained,
    find_vocab_layers,
)
from jaxpipe.distributed.topology import automatic_axes
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.programs.autodiff import differentiable
from jaxpipe.programs.jaxpr import output_specs
from jaxpipe.schedules.partition import cut_stages

from ._arrays import Packed, Pending, Prepared, Residuals
from ._batch import Microbatch, samples_spec
from ._blueprint import Blueprint
from ._epilogue import Epilogue
from ._packing import Packing
from ._plan import PipelinePlan
from ._prologue import Prologue
from ._results import ForwardResult, StageBackwardResult
from ._trunk import Trunk
from ._virtual_stage import VirtualStage
from ._vocab_parallel import VocabInput, VocabLoss


class Weights(NamedTuple):
    """A device's parameters in the layers' compute dtype: all, and the trunk's as prepared."""

    storage: Storage
    trunk: Prepared


class Stage:
    """Forward, loss and backward of a model's virtual stages, the same program on every device.

    Stages exchange activations and gradients in common form (`activations`, `gradients`). Member v
    is the output of virtual stage v; for the last virtual stage it is the epilogue's input.
    `gradients` has one more member, the gradient of the first virtual stage's input, if
    vocabulary-parallel layers precede it. `trains` means that the parameters have masters.

    Attributes:
        last: The last virtual stage; 0 if there is only one.
        vocab_input: The vocabulary-parallel layers before the first virtual stage, or None.
        vocab_loss: The vocabulary-parallel layers after the last virtual stage and the loss, or
            None.
        residuals: Shapes and dtypes of the residuals from a forward to its backward.
        is_hosted: Whether each residual is stored in host memory.
        pending: Shapes and dtypes of the values that a split backward keeps for its weight
            gradient.
    """

    def __init__(
        self, module: PipelineModule, trace: ModelTrace, plan: PipelinePlan, *, trains: bool = True
    ) -> None:
        section = plan.config.pipeline
        split = plan.program.has_split_backward
        self.placement = placement = plan.program.placement
        self.last = len(placement.locations) - 1
        self.cast_inputs = module.cast_inputs
        self.sample_axes = trace.sample_axes
        cuts = cut_stages(plan.signatures, plan.parts)
        self.ends, self.cuts = find_vocab_layers(module.layers, trace, cuts, module.num_stages)
        self.params = ModelParams(
            trace,
            self.cuts,
            placement,
            self.ends,
            dtype=module.compute_dtype,
            grad_dtype=plan.config.data_types.grad_accum_dtype,
            gather=section.gather_weights == "step",
            trains=trains,
        )
        self.collections = ModelCollections(module.layers, trace, self.cuts, placement)
        self.activations, self.gradients = self._common_forms(module, trace, plan.parts)
        context = (jax.eval_shape(lambda: jax.random.key(0)), dict(trace.side))
        blueprint = Blueprint(
            module,
            trace,
            plan.signatures,
            self.cuts,
            placement,
            self.params,
            self.collections,
            context,
        )
        # Where idle actions are skipped there is a branch for each chunk. Otherwise the chunk is an
        # index into the weights of all chunks.
        self.trunk = Trunk(
            blueprint, scan=section.scan_trunk, join=not plan.idle.skips, split=split
        )
        starts = [cut.trunk.start for cut in self.cuts]
        # Without a trunk the prologue's output is the stage's output.
        leaving = self.activations
        if not self.trunk.is_empty:
            leaving = Packing(
                [trace.boundaries[start] for start in starts], boundary_specs(module, trace, starts)
            )
        gradients = self.gradients.structs
        self.prologue = Prologue(blueprint, self.activations, leaving, gradients, split=split)
        self.epilogue = Epilogue(blueprint, self.activations, self.gradients)
        first = self.ends.first
        last = self.ends.last
        self.vocab_input = VocabInput(blueprint, first, self.gradients) if first else None
        self.vocab_loss = (
            VocabLoss(blueprint, last, self.activations, self.gradients) if last else None
        )
        self.residuals = (self.prologue.residuals, self.trunk.residuals)
        self.pending = (self.prologue.pending, self.trunk.pending)
        # Offloading by a layer's recompute policy works only in the trunk. The setting
        # `offload_activations` applies to all residuals.
        hosted = (jax.tree.map(lambda _: False, self.prologue.residuals), self.trunk.is_hosted)
        self.is_hosted = jax.tree.map(lambda moves: moves or section.offload_activations, hosted)

    def _common_forms(
        self, module: PipelineModule, trace: ModelTrace, parts: Sequence[int]
    ) -> tuple[Packing, Packing]:
        """Common forms of the virtual stages' outputs and of gradients."""
        stops = [*parts[1:-1], self.cuts[-1].epilogue.start]
        num_outputs = len(stops)
        if self.ends.first:
            stops.append(self.ends.first.stop)
        outputs = [trace.boundaries[stop] for stop in stops]
        specs = boundary_specs(module, trace, stops)
        gradient_specs = list(map(_differentiable_specs, outputs, specs))
        return (
            Packing(outputs[:num_outputs], specs[:num_outputs]),
            Packing([differentiable(x) for x in outputs], gradient_specs),
        )

    @property
    def num_reported(self) -> int:
        """Length of the vector of values reported by a virtual stage's prologue and trunk."""
        return self.prologue.num_reported + len(self.trunk.aux[0].names)

    @property
    def aux_names(self) -> list[list[tuple[str, str]]]:
        """Kind and name of each stage's reported values: of all chunks, then of the epilogue."""
        names = []
        for s, chunks in enumerate(self.placement.virtual):
            of_stage: list[tuple[str, str]] = []
            for v in chunks:
                of_prologue = list(self.prologue.aux[v].names)
                # Padded like the vector: all branches of the prologue's switch return one length.
                of_stage += of_prologue + [("", "")] * (
                    self.prologue.num_reported - len(of_prologue)
                )
                of_stage += self.trunk.aux[v].names
            names.append(
                of_stage
                + list(self.epilogue.aux.names if s == self.placement.locations[-1][0] else ())
            )
        return names

    def forward(
        self,
        at: VirtualStage,
        weights: Weights,
        batch: Microbatch,
        collections: Storage,
        arrived: Packed,
    ) -> ForwardResult:
        """Run prologue and trunk. The value that arrived and the output are in common form."""
        first = self.prologue.forward(
            at, weights.storage, collections, batch.inputs, arrived, batch.context
        )
        then = self.trunk.forward(at, weights.trunk, first.collections, first.output, batch.context)
        return ForwardResult(
            self.activations.constrain(then.output),
            (first.residuals, then.residuals),
            then.collections,
            jnp.concatenate([first.reported, then.reported]),
        )

    def backward(
        self,
        at: VirtualStage,
        weights: Weights,
        residuals: Residuals,
        gradient: Packed,
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> StageBackwardResult:
        """Run the backward of trunk and prologue from the output's gradient, in common form."""
        of_prologue, of_trunk = residuals
        if not (self.trunk.is_empty or self.gradients.is_identity):
            # Only the input of the first virtual stage differs: all trunks' outputs are alike.
            gradient = self.gradients.unpack(0, gradient)
        trunk = self.trunk.backward(
            at, weights.trunk, of_trunk, gradient, reported_cotangent, split=split
        )
        prologue = self.prologue.backward(
            at, weights.storage, of_prologue, trunk.input_grad, reported_cotangent, split=split
        )
        # A split backward has left the weight gradients to `backward_weight`, except those that the
        # input gradient computes anyway.
        pending = prologue.pending, trunk.pending
        return StageBackwardResult(trunk.grads, prologue.grads, prologue.input_grad, pending)

    def backward_weight(
        self, at: VirtualStage, weights: Weights, residuals: Residuals, pending: Pending
    ) -> tuple[Prepared, Storage | None]:
        """Compute the gradients that a split backward left, for the trunk and other parameters."""
        trunk = self.trunk.backward_weight(at, weights.trunk, residuals[1], pending[1])
        # None: the split backward computed all gradients off the trunk. In the trees, those that it
        # computed are None or zero.
        if not self.prologue.has_deferred:
            return trunk, None
        return trunk, self.prologue.backward_weight(at, weights.storage, residuals[0], pending[0])

    def evaluate(
        self,
        at: VirtualStage,
        weights: Weights,
        batch: Microbatch,
        collections: Storage,
        arrived: Packed,
    ) -> PyTree:
        """Run prologue and trunk outside training."""
        x = self.prologue.evaluate(
            at, weights.storage, collections, batch.inputs, arrived, batch.context
        )
        return self.trunk.evaluate(at, weights.trunk, collections, x, batch.context)

    @property
    def trunk_grad_struct(self) -> Prepared:
        """Shapes and dtypes of the summed gradients of one chunk's trunk."""
        return self.trunk.sums

    def pin_trunk_grads(self, grads: Prepared) -> Prepared:
        """Shard a chunk's summed trunk gradients over automatic axes like its parameters."""
        return jax.tree.map(constrained, grads, self.trunk.specs)

    def pin_off_trunk(self, grads: Storage) -> Storage:
        """Shard the summed gradients off the trunk over automatic axes like their parameters."""
        spec = self.params.grad_layout.spec()
        return jax.tree.map(
            constrained, grads, Storage(spec.packed, {n: spec.stacked[n] for n in grads.stacked})
        )

    def zero_off_trunk_grads(self) -> Storage:
        """Make zeros for the summed gradients of a stage's parameters off the trunk."""
        zeros = self.params.grad_layout.zeros()
        return Storage(
            zeros.packed, {name: zeros.stacked[name] for name in self.params.stacked_off_trunk}
        )

    def zero_vocab_grads(self) -> dict[str, jax.Array]:
        """Make zeros for the summed gradients of vocabulary-parallel layers."""
        zeros = self.params.grad_layout.zeros()
        return {name: zeros.stacked[name] for name in self.params.vocab_names}


def boundary_specs(module: PipelineModule, trace: ModelTrace, stops: Sequence[int]) -> list[PyTree]:
    """Return shardings of boundaries over automatic axes; a stop counts the layers before it."""

    # A boundary is sharded as the layer before it constrains its output. A value that no layer
    # constrains is not sharded, except as `samples_spec` says. Otherwise XLA might shard it
    # differently on neighbouring stages.
    def specs(stop: int) -> PyTree:
        struct = trace.boundaries[stop]
        # No layer constrains the model's inputs, and without automatic axes nothing is sharded.
        if not stop or not automatic_axes(trace.mesh):
            return jax.tree.map(lambda x: samples_spec(x, trace.mesh, trace.sample_axes), struct)
        index = stop - 1

        def run(
            params: PyTree, inputs: PyTree, key: jax.Array, side: PyTree, collections: Storage
        ) -> PyTree:
            return module.run_layers([index], [params], train=True)(
                inputs, key, side, [collections]
            )[0]

        params = trace.cast_params(index, module.compute_dtype)
        key = jax.eval_shape(lambda: jax.random.key(0))
        args = params, trace.boundaries[index], key, dict(trace.side), trace.collections[index]
        leaves, treedef = jax.tree.flatten(struct)
        pairs = zip(leaves, output_specs(jax.make_jaxpr(run)(*args)), strict=True)
        return jax.tree.unflatten(
            treedef,
            [
                samples_spec(x, trace.mesh, trace.sample_axes) if spec == P() else spec
                for x, spec in pairs
            ],
        )

    # Each spec costs a trace of a layer, and virtual stages may share a boundary.
    known = {stop: specs(stop) for stop in set(stops)}
    return [known[stop] for stop in stops]


def _differentiable_specs(struct: PyTree, specs: PyTree) -> list[P]:
    pairs = zip(jax.tree.leaves(struct), jax.tree.leaves(specs), strict=True)
    return [spec for leaf, spec in pairs if differentiable([leaf])]
