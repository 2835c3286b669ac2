"""The computing that a stage does in a cell, assembled from prologue, trunk and epilogue."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule, layer_signatures

from ._cut import StageCut, cut_stages
from ._epilogue import Epilogue
from ._packing import Packing
from ._params import ModelParams
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


class StageParts:
    """Forward, loss and backward of one stage, the same program on every device.

    Activations and gradients that travel are in common form (`activations`, `gradients`): member s is the output of
    stage s; for the last stage it is the epilogue's input.

    Args:
        module: The model.
        trace: Its shapes.
        parts: Boundaries of the stages.
        scan_trunk: Run the trunk's equal layers as a scan.
    """

    def __init__(self, module: PipelineModule, trace: ModelTrace, parts: Sequence[int], *, scan_trunk: bool) -> None:
        self.num_stages = len(parts) - 1
        signatures = layer_signatures(module.layers, trace) if self.num_stages > 1 else (None,) * len(module.layers)
        self.cuts: tuple[StageCut, ...] = cut_stages(signatures, parts)
        self.params = ModelParams(trace, self.cuts)
        outputs = [trace.boundaries[stop] for stop in (*parts[1:-1], self.cuts[-1].epilogue.start)]
        self.activations = Packing(outputs)
        self.gradients = Packing([differentiable(x) for x in outputs])
        context = (jax.eval_shape(lambda: jax.random.key(0)), dict(trace.side))
        self.trunk = Trunk(module, trace, self.cuts, self.params, context, signatures, scan=scan_trunk)
        trunk_inputs = [trace.boundaries[c.trunk.start] for c in self.cuts]
        leaving = self.activations if self.trunk.is_empty else Packing(trunk_inputs)
        self.prologue = Prologue(module, trace, self.cuts, self.params, context, signatures, self.activations, leaving)
        self.epilogue = Epilogue(module, trace, self.cuts, self.params)
        self.kept = (self.prologue.kept, self.trunk.residuals.kept)
        """Shapes and dtypes of what a forward leaves for its backward."""

    def forward(
        self, stage: jax.Array, storage: PyTree, trunk: PyTree, batch: Microbatch, arrived: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run prologue and trunk.

        Args:
            stage: This device's stage.
            storage: Its parameters.
            trunk: The trunk's parameters, prepared.
            batch: The microbatch.
            arrived: The activation that arrived, in common form.

        Returns:
            `(output in common form, what backward needs)`.
        """
        x, kept = self.prologue.forward(stage, storage, batch.inputs, arrived, batch.context)
        if self.trunk.is_empty:
            return x, (kept, [])
        y, trunk_kept = self.trunk.residuals.forward(trunk, x, (self.trunk.offset(stage), *batch.context))
        return y, (kept, trunk_kept)

    def backward(
        self, stage: jax.Array, storage: PyTree, trunk: PyTree, kept: PyTree, gradient: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Run the backward of trunk and prologue.

        Args:
            stage: This device's stage.
            storage: Its parameters.
            trunk: The trunk's parameters, prepared.
            kept: As `forward` returned it.
            gradient: The gradient of the output, in common form.

        Returns:
            `(gradients of the trunk, gradients of the stage's own parameters, gradient of what arrived)`.
        """
        prologue_kept, trunk_kept = kept
        trunk_grads: PyTree = {}
        if not self.trunk.is_empty:
            trunk_grads, gradient = self.trunk.residuals.backward(trunk, trunk_kept, gradient)
        own, arrived = self.prologue.backward(stage, storage, prologue_kept, gradient)
        return trunk_grads, own, arrived

    def loss_and_gradients(
        self, storage: PyTree, batch: Microbatch, output: PyTree
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Run the epilogue of the last stage.

        Returns:
            `(loss, gradients of the stage's own parameters, gradient of the output in common form)`.
        """
        inputs = self.activations.unpack(self.num_stages - 1, output)
        loss, own, gradient = self.epilogue.loss_and_gradients(storage, inputs, batch.labels, batch.context)
        return loss, own, self.gradients.pack(self.num_stages - 1, gradient)

    def evaluate(self, stage: jax.Array, storage: PyTree, trunk: PyTree, batch: Microbatch, arrived: PyTree) -> PyTree:
        """Run prologue and trunk outside training."""
        x = self.prologue.evaluate(stage, storage, batch.inputs, arrived, batch.context)
        return x if self.trunk.is_empty else self.trunk.evaluate(trunk, x, stage, batch.context)

    def loss(self, storage: PyTree, batch: Microbatch, output: PyTree) -> jax.Array:
        """Run the epilogue outside training."""
        inputs = self.activations.unpack(self.num_stages - 1, output)
        return self.epilogue.loss(storage, inputs, batch.labels, batch.context)

    def zero_own_gradients(self) -> PyTree:
        """Zeros in the form of a stage's own gradients."""
        layout = self.params.layout
        common = {n: jnp.zeros(layout.stacked[n].shape, layout.stacked[n].dtype) for n in self.params.common_names}
        return {"stacked": common, "packed": layout.zeros()["packed"]}
