"""The computing that a stage does in a cell, assembled from prologue, trunk and epilogue."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule, layer_signatures

from ._blueprint import Blueprint
from ._collections import ModelCollections
from ._cut import StageCut, cut_stages
from ._epilogue import Epilogue
from ._packing import Packing
from ._params import ModelParams, summed_struct
from ._prologue import Prologue
from ._residuals import differentiable
from ._trunk import Context, Trunk


@dataclass(frozen=True)
class Microbatch:
    """What a cell knows of its microbatch beside what arrives: model inputs, labels, key and side inputs."""

    inputs: PyTree
    labels: PyTree
    context: Context

    def without_key(self) -> "Microbatch":
        """The same for evaluation, where nothing random happens."""
        return dataclasses.replace(self, context=(None, self.context[1]))


@dataclass(frozen=True)
class Place:
    """A device's stage, the stage's parameters, and those of its trunk, prepared."""

    stage: jax.Array
    storage: PyTree
    trunk: PyTree


class StageParts:
    """Forward, loss and backward of one stage, the same program on every device.

    Activations and gradients that travel are in common form (`activations`, `gradients`): member s is the output of
    stage s; for the last stage it is the epilogue's input.

    Args:
        module: The model.
        trace: Its shapes.
        parts: Boundaries of the stages.
        scan_trunk: Run the trunk's equal layers as a scan.
        grad_dtype: What gradients are summed in; None: float32, or the parameters' dtype where that is wider.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        parts: Sequence[int],
        *,
        scan_trunk: bool,
        grad_dtype: Any = None,
    ) -> None:
        self.num_stages, self._module, self._grad_dtype = len(parts) - 1, module, grad_dtype
        self.compute_dtype = dtype = module.compute_dtype
        is_cut = self.num_stages > 1
        signatures = layer_signatures(module.layers, trace, dtype) if is_cut else (None,) * len(module.layers)
        self.cuts: tuple[StageCut, ...] = cut_stages(signatures, parts)
        self.params = ModelParams(trace, self.cuts, dtype=dtype, grad_dtype=grad_dtype)
        self.collections = ModelCollections(module.layers, trace, self.cuts)
        outputs = [trace.boundaries[stop] for stop in (*parts[1:-1], self.cuts[-1].epilogue.start)]
        self.activations = Packing(outputs)
        self.gradients = Packing([differentiable(x) for x in outputs])
        context = (jax.eval_shape(lambda: jax.random.key(0)), dict(trace.side))
        plan = Blueprint(module, trace, signatures, self.cuts, self.params, self.collections, context)
        self.trunk = Trunk(plan, scan=scan_trunk)
        trunk_inputs = [trace.boundaries[c.trunk.start] for c in self.cuts]
        leaving = self.activations if self.trunk.is_empty else Packing(trunk_inputs)
        self.prologue = Prologue(plan, self.activations, leaving)
        self.epilogue = Epilogue(plan)
        self.kept = (self.prologue.kept, self.trunk.kept)
        """Shapes and dtypes of what a forward leaves for its backward."""
        self.is_hosted = (jax.tree.map(lambda _: False, self.prologue.kept), self.trunk.is_hosted)
        """For each of these whether it waits in host memory."""

    @property
    def num_values(self) -> int:
        """Length of the vector of values that prologue and trunk report."""
        return self.prologue.num_values + len(self.trunk.aux[0].names)

    @property
    def aux_names(self) -> list[list[tuple[str, str]]]:
        """Per stage the kind and name of each value reported: prologue (padded), trunk, epilogue."""
        names = []
        for s in range(self.num_stages):
            first = list(self.prologue.aux[s].names)
            first += [("", "")] * (self.prologue.num_values - len(first))
            last = self.epilogue.aux.names if s == self.num_stages - 1 else ()
            names.append([*first, *self.trunk.aux[s].names, *last])
        return names

    def forward(self, at: Place, batch: Microbatch, collections: PyTree, arrived: PyTree) -> tuple:
        """Run prologue and trunk.

        Args:
            at: This device's stage and parameters.
            batch: The microbatch.
            collections: The stage's collections.
            arrived: The activation that arrived, in common form.

        Returns:
            `(output in common form, what backward needs, collections, values reported)`.
        """
        x, first_kept, collections, first = self.prologue.forward(
            at.stage, at.storage, collections, batch.inputs, arrived, batch.context
        )
        y, kept, collections, values = self.trunk.forward(at.stage, at.trunk, collections, x, batch.context)
        return y, (first_kept, kept), collections, jnp.concatenate([first, values])

    def backward(self, at: Place, kept: PyTree, gradient: PyTree, aux_seed: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        """Run the backward of trunk and prologue.

        Args:
            at: This device's stage and parameters.
            kept: As `forward` returned it.
            gradient: The gradient of the output, in common form.
            aux_seed: The gradient of the losses that layers report.

        Returns:
            `(gradients of the trunk, gradients of the stage's own parameters, gradient of what arrived)`.
        """
        first_kept, trunk_kept = kept
        trunk_grads, gradient = self.trunk.backward(at.trunk, trunk_kept, gradient, aux_seed)
        own, arrived = self.prologue.backward(at.stage, at.storage, first_kept, gradient, aux_seed)
        return trunk_grads, own, arrived

    def loss_and_gradients(
        self, at: Place, batch: Microbatch, collections: PyTree, output: PyTree, seeds: tuple[jax.Array, jax.Array]
    ) -> tuple:
        """Run the epilogue of the last stage.

        Returns:
            `(loss, gradients of the stage's own parameters, gradient of the output in common form, collections,
            values reported)`.
        """
        inputs = self.activations.unpack(self.num_stages - 1, output)
        loss, own, gradient, collections, values = self.epilogue.loss_and_gradients(
            at.storage, collections, inputs, batch.labels, batch.context, seeds
        )
        return loss, own, self.gradients.pack(self.num_stages - 1, gradient), collections, values

    def evaluate(self, at: Place, batch: Microbatch, collections: PyTree, arrived: PyTree) -> PyTree:
        """Run prologue and trunk outside training."""
        x = self.prologue.evaluate(at.stage, at.storage, collections, batch.inputs, arrived, batch.context)
        return self.trunk.evaluate(at.stage, at.trunk, collections, x, batch.context)

    def outputs(self, at: Place, batch: Microbatch, collections: PyTree, output: PyTree) -> PyTree:
        """Run the epilogue's layers outside training: the model's output."""
        inputs = self.activations.unpack(self.num_stages - 1, output)
        return self.epilogue.outputs(at.storage, collections, inputs, batch.context)

    def loss_terms(self, outputs: PyTree, labels: PyTree) -> tuple[jax.Array, jax.Array | None]:
        """The loss of one microbatch as `(sum, weight)`, or `(mean, None)`."""
        return self._module.loss_terms(outputs, labels)

    def zero_trunk_gradients(self, trunk: PyTree) -> PyTree:
        """Zeros in the form of the trunk's summed gradients."""

        def zeros(leaf: jax.Array) -> jax.Array:
            like = summed_struct(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._grad_dtype)
            return jnp.zeros(like.shape, like.dtype)

        return jax.tree.map(zeros, trunk)

    def zero_own_gradients(self) -> PyTree:
        """Zeros in the form of a stage's own gradients."""
        layout = self.params.grad_layout
        common = {n: jnp.zeros(layout.stacked[n].shape, layout.stacked[n].dtype) for n in self.params.common_names}
        return {"stacked": common, "packed": layout.zeros()["packed"]}
