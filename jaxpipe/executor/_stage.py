"""The computing of a cell, assembled from prologue, trunk and epilogue."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import differentiable
from jaxpipe.layers import ModelTrace, PipelineModule, layer_signatures
from jaxpipe.state import ModelCollections, ModelParams, cut_stages, find_ends, summed_struct

from ._batch import Microbatch
from ._blueprint import Blueprint
from ._cell import Cell
from ._epilogue import Epilogue
from ._packing import Packing
from ._plan import Plan
from ._prologue import Prologue
from ._trunk import Trunk
from ._vocab_parallel import FirstTogether, LastTogether


@dataclass(frozen=True)
class Held:
    """A device's parameters, and those of its trunk, prepared."""

    storage: PyTree
    trunk: PyTree


class StageParts:
    """Forward, loss and backward of the parts of a model, the same program on every device.

    Activations and gradients that travel are in common form (`activations`, `gradients`): member p is the output of
    part p; for the last part it is the epilogue's input. One member more is part 0's input, where all stages run the
    layers before it together.

    Args:
        module: The model.
        trace: Its shapes.
        plan: Its cut, and how it runs.
    """

    def __init__(self, module: PipelineModule, trace: ModelTrace, plan: Plan) -> None:
        section, boundaries, split = plan.config.pipeline, plan.parts, plan.program.has_split_backward
        self.placement = placement = plan.placement
        self._module, self._grad_dtype = module, plan.config.data_types.grad_accum_dtype
        self.last = len(placement.home) - 1
        """The last part; the only one where it is 0."""
        self.compute_dtype = dtype = module.compute_dtype
        signatures = layer_signatures(module.layers, trace, dtype) if self.last else (None,) * len(module.layers)
        cuts = cut_stages(signatures, boundaries)
        self.ends, self.cuts = find_ends(module.layers, trace, cuts, module.num_stages)
        self.params = ModelParams(trace, self.cuts, placement, self.ends, dtype=dtype, grad_dtype=self._grad_dtype)
        self.collections = ModelCollections(module.layers, trace, self.cuts, placement)
        outputs = [trace.boundaries[stop] for stop in (*boundaries[1:-1], self.cuts[-1].epilogue.start)]
        if self.ends.first:
            outputs.append(trace.boundaries[self.ends.first.stop])
        self.activations = Packing(outputs)
        self.gradients = Packing([differentiable(x) for x in outputs])
        context = (jax.eval_shape(lambda: jax.random.key(0)), dict(trace.side))
        blueprint = Blueprint(module, trace, signatures, self.cuts, placement, self.params, self.collections, context)
        self.trunk = Trunk(blueprint, scan=section.scan_trunk, join=not plan.skips, split=split)
        trunk_inputs = [trace.boundaries[c.trunk.start] for c in self.cuts]
        leaving = self.activations if self.trunk.is_empty else Packing(trunk_inputs)
        self.prologue = Prologue(blueprint, self.activations, leaving, split=split)
        self.epilogue = Epilogue(blueprint)
        self.first = FirstTogether(blueprint, self.ends.first) if self.ends.first else None
        """The layers before part 0, where all stages run them together."""
        self.final = LastTogether(blueprint, self.ends.last) if self.ends.last else None
        """The layers after the last part, where all stages run them together."""
        self.kept = (self.prologue.kept, self.trunk.kept)
        """Shapes and dtypes of what a forward leaves for its backward."""
        self.pending = (self.prologue.pending, self.trunk.pending)
        """Shapes and dtypes of what the input half of a backward leaves for the weight half."""
        hosted = (jax.tree.map(lambda _: False, self.prologue.kept), self.trunk.is_hosted)
        self.is_hosted = jax.tree.map(lambda moves: moves or section.offload_activations, hosted)
        """For each of these whether it waits in host memory."""

    @property
    def num_values(self) -> int:
        """Length of the vector of values that prologue and trunk of a part report."""
        return self.prologue.num_values + len(self.trunk.aux[0].names)

    @property
    def aux_names(self) -> list[list[tuple[str, str]]]:
        """Per stage the kind and name of each value reported: per chunk prologue (padded) and trunk; epilogue."""
        names = []
        for s, parts in enumerate(self.placement.virtual):
            of_stage: list[tuple[str, str]] = []
            for part in parts:
                first = list(self.prologue.aux[part].names)
                of_stage += first + [("", "")] * (self.prologue.num_values - len(first))
                of_stage += self.trunk.aux[part].names
            names.append(of_stage + list(self.epilogue.aux.names if s == self.placement.home[-1][0] else ()))
        return names

    def forward(self, at: Cell, held: Held, batch: Microbatch, collections: PyTree, arrived: PyTree) -> tuple:
        """Run prologue and trunk.

        Args:
            at: The part.
            held: The stage's parameters.
            batch: The microbatch.
            collections: The stage's collections.
            arrived: The activation that arrived, in common form.

        Returns:
            `(output in common form, what backward needs, collections, values reported)`.
        """
        x, first_kept, collections, first = self.prologue.forward(
            at, held.storage, collections, batch.inputs, arrived, batch.context
        )
        y, kept, collections, values = self.trunk.forward(at, held.trunk, collections, x, batch.context)
        return y, (first_kept, kept), collections, jnp.concatenate([first, values])

    def backward(
        self, at: Cell, held: Held, kept: PyTree, gradient: PyTree, aux_seed: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run the backward of trunk and prologue.

        Args:
            at: The part.
            held: The stage's parameters.
            kept: As `forward` returned it.
            gradient: The gradient of the output, in common form.
            aux_seed: The gradient of the losses that layers report.

        Returns:
            `(gradients of the part's trunk, gradients of the stage's own parameters, gradient of what arrived)`.
        """
        first_kept, trunk_kept = kept
        trunk, gradient = self.trunk.backward(at, held.trunk, trunk_kept, gradient, aux_seed)
        own, arrived = self.prologue.backward(at, held.storage, first_kept, gradient, aux_seed)
        return trunk, own, arrived

    def backward_input(
        self, at: Cell, held: Held, kept: PyTree, gradient: PyTree, aux_seed: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """Run the half of the backward that the part before waits for.

        Returns:
            As `backward`, without the gradients that the other half gives, and what that half needs.
        """
        first_kept, trunk_kept = kept
        trunk, gradient, pending = self.trunk.backward_input(at, held.trunk, trunk_kept, gradient, aux_seed)
        own, arrived, first = self.prologue.backward_input(at, held.storage, first_kept, gradient, aux_seed)
        return trunk, own, arrived, (first, pending)

    def backward_weight(self, at: Cell, held: Held, kept: PyTree, pending: PyTree) -> tuple[PyTree, PyTree]:
        """Run the other half.

        Returns:
            `(gradients of the part's trunk, gradients of the stage's own parameters)`, those that it gives.
        """
        trunk = self.trunk.backward_weight(at, held.trunk, kept[1], pending[1])
        return trunk, self.prologue.backward_weight(at, held.storage, kept[0], pending[0])

    def loss_and_gradients(
        self, held: Held, batch: Microbatch, collections: PyTree, output: PyTree, seeds: tuple[jax.Array, jax.Array]
    ) -> tuple:
        """Run the epilogue.

        Returns:
            `(loss, gradients of the stage's own parameters, gradient of the output in common form, collections,
            values reported)`.
        """
        inputs = self.activations.unpack(self.last, output)
        loss, own, gradient, collections, values = self.epilogue.loss_and_gradients(
            held.storage, collections, inputs, batch.labels, batch.context, seeds
        )
        return loss, own, self.gradients.pack(self.last, gradient), collections, values

    def first_gradients(self, held: Held, batch: Microbatch, gradient: PyTree) -> dict[str, jax.Array]:
        """Run the backward of the layers before part 0, on all stages.

        Args:
            held: The stage's parameters.
            batch: The microbatch, with the model's inputs.
            gradient: The gradient of part 0's input, in common form; zero on stages that do not hold part 0.

        Returns:
            Gradients of parameters, by name.
        """
        assert self.first is not None
        given = self.gradients.unpack(self.last + 1, gradient)
        return self.first.gradients(held.storage, batch.inputs, batch.context, given)

    def loss_together(
        self, held: Held, batch: Microbatch, is_home: jax.Array, output: PyTree, seed: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array], PyTree]:
        """Run the layers after the last part and the loss, on all stages.

        Returns:
            `(loss, gradients of parameters by name, gradient of the output in common form)`; loss and the latter are
            zero where the last part is not.
        """
        assert self.final is not None
        inputs = self.activations.unpack(self.last, output)
        given = batch.labels, batch.context, seed
        loss, grads, gradient = self.final.loss_and_gradients(held.storage, is_home, inputs, *given)
        return loss, grads, self.gradients.pack(self.last, gradient)

    def evaluate(self, at: Cell, held: Held, batch: Microbatch, collections: PyTree, arrived: PyTree) -> PyTree:
        """Run prologue and trunk outside training."""
        x = self.prologue.evaluate(at, held.storage, collections, batch.inputs, arrived, batch.context)
        return self.trunk.evaluate(at, held.trunk, collections, x, batch.context)

    def outputs(self, held: Held, batch: Microbatch, is_home: jax.Array, collections: PyTree, output: PyTree) -> PyTree:
        """Run the epilogue's layers outside training: the model's output, or this stage's slices of it."""
        inputs = self.activations.unpack(self.last, output)
        if self.final is not None:
            return self.final.outputs_of(held.storage, is_home, inputs, batch.context)
        return self.epilogue.outputs(held.storage, collections, inputs, batch.context)

    def check_loss(self, labels: PyTree) -> None:
        """Refuse a loss that does not know that it gets slices of the outputs.

        Raises:
            LayerError: It has no collectives over the stages.
        """
        if self.final is not None:
            self.final.check_loss(labels)

    def whole_outputs(self, outputs: PyTree) -> PyTree:
        """The model's output from what `outputs` gives."""
        return outputs if self.final is None else self.final.whole(outputs)

    def loss_terms(self, outputs: PyTree, labels: PyTree) -> tuple[jax.Array, jax.Array | None]:
        """The loss of one microbatch as `(sum, weight)`, or `(mean, None)`."""
        return self._module.loss_terms(outputs, labels)

    @property
    def trunk_gradients(self) -> PyTree:
        """Shapes and dtypes of the summed gradients of one chunk's trunk."""
        return self.trunk.gradients(lambda like: summed_struct(like, self._grad_dtype))

    def zero_own_gradients(self) -> PyTree:
        """Zeros in the form of a stage's own gradients."""
        layout = self.params.grad_layout
        common = {n: jnp.zeros(layout.stacked[n].shape, layout.stacked[n].dtype) for n in self.params.common_names}
        return {"stacked": common, "packed": layout.zeros()["packed"]}

    def zero_end_gradients(self) -> dict[str, jax.Array]:
        """Zeros in the form of the summed gradients of layers that all stages run together."""
        stacked = self.params.grad_layout.stacked
        return {n: jnp.zeros(stacked[n].shape, stacked[n].dtype) for n in self.params.end_names}
