"""The epilogue: the layers after the trunk and the loss, with value and gradient fused."""

from typing import Any

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage
from jaxpipe.programs.autodiff import differentiable, replace_differentiable

from ._arrays import Packed
from ._batch import Context, Microbatch
from ._blueprint import Blueprint
from ._packing import Packing
from ._results import LossResult
from ._segment_program import SegmentProgram


class Epilogue:
    """The loss of one microbatch and its gradients, without residuals: no ring holds the logits."""

    def __init__(self, blueprint: Blueprint, activations: Packing, gradients: Packing) -> None:
        self._module = blueprint.module
        self._last = len(blueprint.cuts) - 1
        # The common forms of the outputs of virtual stages, and of their gradients.
        self._activations = activations
        self._gradients = gradients
        self._program = SegmentProgram(
            blueprint, self._last, [cut.epilogue for cut in blueprint.cuts]
        )
        self._segment = self._program.segment
        self.aux = self._program.aux

    def outputs(
        self, storage: Storage, collections: Storage, output: Packed, context: Context
    ) -> PyTree:
        """Compute the model's output outside training, from the last trunk's output."""
        inputs = self._activations.unpack(self._last, output)
        full_context = (0, *context, self._segment.collections(collections))
        return self._program.run(self._segment.take(storage), inputs, full_context, train=False)[0]

    def loss_and_gradients(
        self,
        storage: Storage,
        collections: Storage,
        output: Packed,
        batch: Microbatch,
        cotangents: tuple[jax.Array, jax.Array],
    ) -> LossResult:
        """Compute a microbatch's loss and its gradients, from the trunk's packed output."""
        segment = self._segment
        inputs = self._activations.unpack(self._last, output)
        full_context = (0, *batch.context, segment.collections(collections))
        trained, frozen = segment.divided(segment.take(storage))

        def total_loss(
            trained: dict[str, jax.Array], values: list[jax.Array]
        ) -> tuple[jax.Array, tuple[Any, ...]]:
            leaves = {**trained, **frozen}
            inputs_now = replace_differentiable(inputs, values)
            outputs, extras = self._program.run(leaves, inputs_now, full_context, train=True)
            sums = self._module.loss_terms(outputs, batch.labels).sums()
            aux_loss, reported = self.aux.collect([aux for _, aux in extras], len(self.aux.names))
            new = segment.put(collections, [collection for collection, _ in extras])
            # Scaled before differentiation, not after: see `DevicePrograms._cotangents`.
            total = sums[0] * cotangents[0] + (
                aux_loss * cotangents[1] if self.aux.has_losses else 0.0
            )
            return total, (sums, new, reported)

        # One function computes value and gradient. Nothing runs between forward and backward, so
        # logits, the largest activations of a language model, exist only inside it.
        gradient = jax.grad(total_loss, argnums=(0, 1), has_aux=True)
        (grads, dx), (sums, new, reported) = gradient(trained, differentiable(inputs))
        off_trunk = segment.off_trunk(grads)
        return LossResult(sums, off_trunk, self._gradients.pack(self._last, dx), new, reported)
