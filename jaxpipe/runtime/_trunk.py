"""The trunk: the same layers on every stage, run as one straight program without a conditional."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule

from ._cut import StageCut
from ._params import ModelParams
from ._residuals import Residuals

Context = tuple[jax.Array | None, PyTree]
"""A microbatch's key (None in evaluation) and its side inputs."""


class Trunk:
    """Forward and backward of the layers that all stages have alike.

    Args:
        module: The model.
        trace: Its shapes.
        cuts: The stages.
        params: Where the parameters lie.
        context: Shapes and dtypes of a microbatch's key and side inputs.
        signatures: Per layer a value that is equal for alike layers.
        scan: Run equal layers as one `lax.scan`, so that the program's size does not grow with their number; their
            parameters are then stacked once per step. Layers that differ from one another are never scanned.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        params: ModelParams,
        context: PyTree,
        signatures: Sequence[Hashable],
        *,
        scan: bool,
    ) -> None:
        self._module = module
        self._layers = cuts[0].trunk
        self._stage = params.stages[0]
        self._names = params.trunk_names
        self._starts = tuple(cut.trunk.start for cut in cuts)
        self._scan = scan and len(self._layers) > 1 and len({signatures[i] for i in self._layers}) == 1
        self.inputs = trace.boundaries[cuts[0].trunk.start]
        struct = jax.eval_shape(self.prepare, {name: params.layout.stacked[name] for name in self._names})
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        self.residuals = Residuals(self._run, struct, self.inputs, (offset, *context))

    @property
    def is_empty(self) -> bool:
        """Whether the stages have nothing in common."""
        return not self._layers

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

    def offset(self, stage: jax.Array) -> jax.Array:
        """How far the layer indices of a stage's trunk lie from those of stage 0's."""
        return jnp.asarray(self._starts, jnp.int32)[stage] - self._starts[0]

    def evaluate(self, params: PyTree, inputs: PyTree, stage: jax.Array, context: Context) -> PyTree:
        """Forward pass outside training."""
        return self._run(params, inputs, (self.offset(stage), *context), train=False)

    def _run(
        self, params: PyTree, inputs: PyTree, context: tuple[jax.Array, jax.Array | None, PyTree], *, train: bool = True
    ) -> PyTree:
        offset, key, side = context
        if not self._scan:
            views = [self._stage.view(i, params) for i in self._layers]
            return self._module.run_layers(self._layers, views, train=train, offset=offset)(inputs, key, side)
        interval = self._module.activation_checkpoint_interval or 1
        group = interval if len(self._layers) % interval == 0 else 1

        def body(x: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            start, views = xs
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], views) for j in range(group)]
            indices = range(self._layers.start, self._layers.start + group)
            return self._module.run_layers(indices, each, train=train, offset=offset + start)(x, key, side), None

        starts = jnp.arange(0, len(self._layers), group, dtype=jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), params)
        return jax.lax.scan(body, inputs, (starts, grouped))[0]
