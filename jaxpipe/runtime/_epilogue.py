"""The epilogue: the last stage's layers after the trunk, and the loss, as one fused value and gradient."""

from collections.abc import Sequence

import jax

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule

from ._cut import StageCut
from ._params import ModelParams
from ._prologue import own_gradient
from ._residuals import differentiable, replace_differentiable
from ._trunk import Context


class Epilogue:
    """Loss of one microbatch and its gradients, with nothing kept between forward and backward.

    Args:
        module: The model.
        trace: Its shapes.
        cuts: The stages.
        params: Where the parameters lie.
    """

    def __init__(
        self, module: PipelineModule, trace: ModelTrace, cuts: Sequence[StageCut], params: ModelParams
    ) -> None:
        self._module, self._params = module, params
        self._last = len(cuts) - 1
        self._layers = cuts[-1].epilogue
        self._names = params.stages[-1].names_of(self._layers)
        self.inputs = trace.boundaries[self._layers.start]

    def loss(self, storage: PyTree, inputs: PyTree, labels: PyTree, context: Context) -> jax.Array:
        """The loss of one microbatch outside training."""
        return self._loss(self._take(storage), inputs, labels, context, train=False)

    def loss_and_gradients(
        self, storage: PyTree, inputs: PyTree, labels: PyTree, context: Context
    ) -> tuple[jax.Array, PyTree, list[jax.Array]]:
        """The loss of one microbatch with its gradients.

        Args:
            storage: The last stage's parameters.
            inputs: The trunk's output.
            labels: The microbatch's labels.
            context: The microbatch's key and side inputs.

        Returns:
            `(loss, gradients of the stage's own parameters, gradients of the differentiable inputs)`.
        """

        def of_moving(leaves: dict[str, jax.Array], values: list[jax.Array]) -> jax.Array:
            return self._loss(leaves, replace_differentiable(inputs, values), labels, context, train=True)

        loss, (grads, dx) = jax.value_and_grad(of_moving, argnums=(0, 1))(self._take(storage), differentiable(inputs))
        return loss, own_gradient(self._params, self._last, grads), dx

    def _take(self, storage: PyTree) -> dict[str, jax.Array]:
        return {name: self._params.layout.get(self._last, name, storage) for name in self._names}

    def _loss(
        self, leaves: dict[str, jax.Array], inputs: PyTree, labels: PyTree, context: Context, *, train: bool
    ) -> jax.Array:
        views = [self._params.stages[-1].view(i, leaves) for i in self._layers]
        outputs = self._module.run_layers(self._layers, views, train=train)(inputs, *context)
        return self._module.loss(outputs, labels)
