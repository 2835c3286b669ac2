"""The trunk: the same layers on every stage, run as one straight program without a conditional."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._aux import AuxSlots
from ._blueprint import Blueprint
from ._residuals import Residuals

Context = tuple[jax.Array | None, PyTree]
"""A microbatch's key (None in evaluation) and its side inputs."""


class Trunk:
    """Forward and backward of the layers that all stages have alike.

    Args:
        plan: The model, cut.
        scan: Run equal layers as one `lax.scan`, so that the program's size does not grow with their number; their
            parameters are then stacked once per step. Layers that differ from one another, keep collections or report
            anything are never scanned.

    Attributes:
        aux: What the trunk of each stage reports.
    """

    def __init__(self, plan: Blueprint, *, scan: bool) -> None:
        self._module, self._collections = plan.module, plan.collections
        self._layers = plan.cuts[0].trunk
        self._stage = plan.params.stages[0]
        self._names = plan.params.trunk_names
        self._starts = tuple(cut.trunk.start for cut in plan.cuts)
        self.aux = [AuxSlots(plan.module.layers, plan.trace, cut.trunk) for cut in plan.cuts]
        is_plain = not (self.aux[0].names or plan.collections.has_any(self._layers))
        are_alike = len(self._layers) > 1 and len({plan.signatures[i] for i in self._layers}) == 1
        self._scan = scan and are_alike and is_plain
        self.inputs = plan.trace.boundaries[plan.cuts[0].trunk.start]
        struct = jax.eval_shape(self.prepare, {name: plan.params.layout.stacked[name] for name in self._names})
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        held = [plan.trace.collections[i] for i in self._layers]
        self._residuals = Residuals(self._train, struct, self.inputs, (offset, *plan.context, held))

    @property
    def is_empty(self) -> bool:
        """Whether the stages have nothing in common."""
        return not self._layers

    @property
    def kept(self) -> PyTree:
        """Shapes and dtypes of what `forward` leaves for `backward`."""
        return [] if self.is_empty else self._residuals.kept

    @property
    def is_hosted(self) -> PyTree:
        """Per leaf of `kept` whether it waits in host memory."""
        return [] if self.is_empty else self._residuals.is_hosted

    def prepare(self, stacked: dict[str, jax.Array]) -> PyTree:
        """The trunk's parameters as its cells use them."""
        leaves = {name: stacked[name] for name in self._names}
        if not self._scan:
            return leaves
        views = [self._stage.view(i, leaves) for i in self._layers]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *views)

    def named(self, grads: PyTree) -> dict[str, jax.Array]:
        """Gradients by name, from gradients in the form of `prepare`."""
        if not self._scan:
            return grads
        named = {}
        for place, index in enumerate(self._layers):
            for path, name in self._stage.layers[index].items():
                leaf = grads
                for key in path:
                    leaf = leaf[key]
                named[name] = leaf[place]
        return named

    def forward(
        self, stage: jax.Array, params: PyTree, collections: PyTree, inputs: PyTree, context: Context
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        """Run the trunk of this device's stage.

        Args:
            stage: Index along the `stage` axis.
            params: The trunk's parameters, prepared.
            collections: The stage's collections.
            inputs: What enters the trunk.
            context: The microbatch's key and side inputs.

        Returns:
            `(output, what backward needs, collections, values reported)`.
        """
        if self.is_empty:
            return inputs, [], collections, jnp.zeros((0,), jnp.float32)
        full = (self._offset(stage), *context, self._held(collections))
        (y, *_), (new, values), kept = self._residuals.forward(params, inputs, full)
        return y, kept, self._collections.put(0, self._layers, collections, new), values

    def backward(
        self, params: PyTree, kept: PyTree, gradient: list[jax.Array], aux_seed: jax.Array
    ) -> tuple[PyTree, list[jax.Array]]:
        """Run the backward.

        Args:
            params: The trunk's parameters, prepared.
            kept: As `forward` returned it.
            gradient: Gradient of the output's differentiable leaves.
            aux_seed: Gradient of the losses that the layers report.

        Returns:
            `(gradients of the parameters, gradient of the input)`.
        """
        if self.is_empty:
            return {}, gradient
        seeds = [aux_seed] if self.aux[0].has_losses else []
        return self._residuals.backward(params, kept, [*gradient, *seeds])

    def evaluate(
        self, stage: jax.Array, params: PyTree, collections: PyTree, inputs: PyTree, context: Context
    ) -> PyTree:
        """Forward pass outside training."""
        if self.is_empty:
            return inputs
        return self._run(params, inputs, (self._offset(stage), *context, self._held(collections)), train=False)[0]

    def _offset(self, stage: jax.Array) -> jax.Array:
        """How far the layer indices of a stage's trunk lie from those of stage 0's."""
        return jnp.asarray(self._starts, jnp.int32)[stage] - self._starts[0]

    def _held(self, collections: PyTree) -> list[PyTree]:
        return self._collections.views(0, self._layers, collections)

    def _train(self, params: PyTree, inputs: PyTree, context: tuple) -> tuple[PyTree, tuple[PyTree, jax.Array]]:
        y, extras = self._run(params, inputs, context, train=True)
        loss, values = self.aux[0].collect([aux for _, aux in extras], len(self.aux[0].names))
        outputs = (y, loss) if self.aux[0].has_losses else (y,)
        return outputs, ([held for held, _ in extras], values)

    def _run(self, params: PyTree, inputs: PyTree, context: tuple, *, train: bool) -> tuple[PyTree, Any]:
        offset, key, side, held = context
        if not self._scan:
            views = [self._stage.view(i, params) for i in self._layers]
            return self._module.run_layers(self._layers, views, train=train, offset=offset)(inputs, key, side, held)
        interval = self._module.activation_checkpoint_interval or 1
        group = interval if len(self._layers) % interval == 0 else 1

        def body(x: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            start, views = xs
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], views) for j in range(group)]
            indices = range(self._layers.start, self._layers.start + group)
            run = self._module.run_layers(indices, each, train=train, offset=offset + start)
            return run(x, key, side, held[:group])[0], None

        starts = jnp.arange(0, len(self._layers), group, dtype=jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), params)
        return jax.lax.scan(body, inputs, (starts, grouped))[0], [({}, {}) for _ in self._layers]
