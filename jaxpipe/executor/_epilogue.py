"""The epilogue: the last layers, after the trunk, and the loss, as one fused value and gradient."""

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import differentiable, replace_differentiable

from ._batch import Context
from ._blueprint import Blueprint
from ._prologue import off_trunk_gradient
from ._reported import ReportedValues


class Epilogue:
    """Loss of one microbatch and its gradients, without residuals: the logits are never held in a ring.

    Args:
        blueprint: The model, cut.

    Attributes:
        aux: What its layers report.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._module, self._params, self._collections = blueprint.module, blueprint.params, blueprint.collections
        self._last = blueprint.placement.locations[-1][0]
        self._layers = blueprint.cuts[-1].epilogue
        self._stage = blueprint.params.stages[self._last]
        self._names = self._stage.names_of(self._layers)
        self.aux = ReportedValues(blueprint.module.layers, blueprint.trace, self._layers)

    def outputs(self, storage: PyTree, collections: PyTree, inputs: PyTree, context: Context) -> PyTree:
        """The model's output for one microbatch, outside training."""
        return self._run(self._take(storage), collections, inputs, context, train=False)[0]

    def loss_and_gradients(
        self,
        storage: PyTree,
        collections: PyTree,
        inputs: PyTree,
        labels: PyTree,
        context: Context,
        cotangents: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, PyTree, list[jax.Array], PyTree, jax.Array]:
        """The loss of one microbatch with its gradients.

        Args:
            storage: The parameters of the stage that holds it.
            collections: Its collections.
            inputs: The trunk's output.
            labels: The microbatch's labels.
            context: The microbatch's key and side inputs.
            cotangents: What the loss, and the losses that layers report, are multiplied with before differentiation.

        Returns:
            `(loss, gradients of parameters off the trunk, gradients of the differentiable inputs, collections,
            values reported)`; the loss is the sum where `loss_fn` returns a sum and a weight.
        """

        def total_loss(leaves: dict[str, jax.Array], values: list[jax.Array]) -> tuple[jax.Array, tuple]:
            inputs_now = replace_differentiable(inputs, values)
            outputs, extras = self._run(leaves, collections, inputs_now, context, train=True)
            loss = self._module.loss_terms(outputs, labels)[0].astype(jnp.float32)
            aux_loss, reported = self.aux.collect([aux for _, aux in extras], len(self.aux.names))
            new = self._collections.put(self._last, self._layers, collections, [collection for collection, _ in extras])
            # Scaled before differentiation, not after: see `DevicePrograms._cotangents`.
            total = loss * cotangents[0] + (aux_loss * cotangents[1] if self.aux.has_losses else 0.0)
            return total, (loss, new, reported)

        # One function for value and gradient: nothing lies between forward and backward, so logits, the largest
        # activations of a language model, live only inside it.
        gradient = jax.grad(total_loss, argnums=(0, 1), has_aux=True)
        (grads, dx), (loss, new, reported) = gradient(self._take(storage), differentiable(inputs))
        return loss, off_trunk_gradient(self._params, self._last, grads), dx, new, reported

    def _take(self, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(self._last, name, storage) for name in self._names}

    def _run(
        self, leaves: dict[str, jax.Array], collections: PyTree, inputs: PyTree, context: Context, *, train: bool
    ) -> tuple[PyTree, tuple]:
        views = [self._stage.view(i, leaves) for i in self._layers]
        of_layers = self._collections.views(self._last, self._layers, collections)
        return self._module.run_layers(self._layers, views, train=train)(inputs, *context, of_layers)
