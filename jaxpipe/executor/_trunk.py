"""The trunk: the same layers in every virtual stage, run as one straight program without a conditional."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, split_backward

from ._batch import Context
from ._blueprint import Blueprint
from ._buffers import select, zeros_of
from ._reported import ReportedValues
from ._virtual_stage import VirtualStage


class Trunk:
    """Forward and backward of the layers that are the same in all virtual stages.

    A chunk is a number where the program is compiled for that chunk alone, or an array: then the chunk's parameters
    are taken out of those of all chunks when an action runs, which copies them.

    Args:
        blueprint: The model, cut.
        scan: Run equal layers as one `lax.scan`, so that the program's size does not grow with their number; their
            parameters are then stacked once per step. Layers that differ from one another, keep collections or report
            anything are never scanned.
        join: Stack the parameters of all chunks, for chunks that are arrays.
        split: Make the split backward too.

    Attributes:
        params: Shapes and dtypes of one chunk's parameters.
        specs: Their sharding over automatic axes.
        aux: What the trunk of each virtual stage reports.
    """

    def __init__(self, blueprint: Blueprint, *, scan: bool, join: bool, split: bool) -> None:
        self._module, self._collections = blueprint.module, blueprint.collections
        # All trunks are the same program: it is built once, from the layers of the first virtual stage, and the others
        # differ in their parameters and in the layer indices that go into random keys.
        self._layers = blueprint.cuts[0].trunk
        self._first_stage = blueprint.placement.locations[0][0]
        self._stage = blueprint.params.stages[self._first_stage]
        self._in_chunk = [blueprint.cuts[v].trunk for v in blueprint.placement.virtual[self._first_stage]]
        """By chunk its layers on the stage of the first virtual stage."""
        self._names = [
            dict(zip(self._own_names(self._layers), self._own_names(at), strict=True)) for at in self._in_chunk
        ]
        """By chunk the parameters' names, by those of the first virtual stage."""
        self._starts = tuple(cut.trunk.start for cut in blueprint.cuts)
        self._join = join and len(self._in_chunk) > 1
        self.aux = [ReportedValues(blueprint.module.layers, blueprint.trace, cut.trunk) for cut in blueprint.cuts]
        # A scan stacks what its body returns, so collections and reports of its layers would need names of their own.
        is_plain = not (self.aux[0].names or blueprint.collections.has_any(self._layers))
        are_alike = len(self._layers) > 1 and len({blueprint.signatures[i] for i in self._layers}) == 1
        self._scan = scan and are_alike and is_plain
        self.inputs = blueprint.trace.boundaries[blueprint.cuts[0].trunk.start]
        stacked = {name: blueprint.params.layout.stacked[name] for name in self._names[0].values()}
        struct = jax.eval_shape(lambda stacked: self._prepare(stacked, 0), stacked)
        offset = jax.ShapeDtypeStruct((), jnp.int32)
        collections = [blueprint.trace.collections[i] for i in self._layers]
        self.params = struct
        specs = {name: blueprint.params.layout.specs.get(name, P()) for name in stacked}
        # Layers that are scanned are stacked along a new first dim.
        self.specs = (
            jax.tree.map(lambda spec: P(None, *spec), self._stage.view(self._layers[0], specs)) if self._scan else specs
        )
        self._residuals = Residuals(self._train, struct, self.inputs, (offset, *blueprint.context, collections))
        self._split = split_backward(self._residuals, struct, "trunk") if split and not self.is_empty else None

    @property
    def is_empty(self) -> bool:
        """True if the stages have nothing in common."""
        return not self._layers

    @property
    def residuals(self) -> PyTree:
        """Shapes and dtypes of what `forward` leaves for `backward`."""
        return [] if self.is_empty else self._residuals.structs

    @property
    def is_hosted(self) -> PyTree:
        """Per leaf of `residuals` whether it waits in host memory."""
        return [] if self.is_empty else self._residuals.is_hosted

    @property
    def pending(self) -> PyTree:
        """Shapes and dtypes of what a split backward leaves for its weight gradient."""
        return [] if self._split is None else self._split.pending

    def prepare(self, stacked: dict[str, jax.Array]) -> PyTree:
        """The trunk's parameters as its actions use them: by chunk, or all chunks along a first dim."""
        each = [self._prepare(stacked, chunk) for chunk in range(len(self._names))]
        # Once a step, outside the loop: inside, XLA would stack them again in every tick.
        return jax.tree.map(lambda *xs: jnp.stack(xs), *each) if self._join else each

    def named(self, grads: PyTree) -> dict[str, jax.Array]:
        """Gradients by name, from those of all chunks along a first dim."""
        found: dict[str, jax.Array] = {}
        for chunk, names in enumerate(self._names):
            of_chunk = jax.tree.map(lambda x, chunk=chunk: x[chunk], grads)
            found |= {names[name]: leaf for name, leaf in self._by_name(of_chunk).items()}
        return found

    def forward(
        self, at: VirtualStage, params: PyTree, collections: PyTree, inputs: PyTree, context: Context
    ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
        """Forward in training, as `Stage.forward`; `params` are prepared."""
        if self.is_empty:
            return inputs, [], collections, jnp.zeros((0,), jnp.float32)
        full = (self._offset(at), *context, self._collections_of(at, collections))
        (y, *_), (new, values), residuals = self._residuals.forward(self._take(at, params), inputs, full)
        return y, residuals, self._put(at, collections, new), values

    def backward(
        self,
        at: VirtualStage,
        params: PyTree,
        residuals: PyTree,
        gradient: list[jax.Array],
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        """Backward, as `Stage.backward`.

        Returns:
            `(gradients of the parameters, gradient of the input's differentiable leaves, what backward_weight needs)`.
        """
        if self.is_empty:
            return {}, gradient, []
        # Losses that layers report are one more output of the trunk, so that their gradients need no pass of their own.
        cotangents = [*gradient, *([reported_cotangent] if self.aux[0].has_losses else [])]
        taken = self._take(at, params)
        if split and self._split is not None:
            return self._split.backward_input(taken, residuals, cotangents)
        return *self._residuals.backward(taken, residuals, cotangents), zeros_of(self.pending)

    def backward_weight(self, at: VirtualStage, params: PyTree, residuals: PyTree, pending: list[jax.Array]) -> PyTree:
        """Gradients that a split backward has left, None where it gave them."""
        return {} if self._split is None else self._split.backward_weight(self._take(at, params), residuals, pending)

    def evaluate(
        self, at: VirtualStage, params: PyTree, collections: PyTree, inputs: PyTree, context: Context
    ) -> PyTree:
        """Forward outside training."""
        if self.is_empty:
            return inputs
        full = (self._offset(at), *context, self._collections_of(at, collections))
        return self._run(self._take(at, params), inputs, full, train=False)[0]

    def _own_names(self, layers: range) -> list[str]:
        return self._stage.names_of(layers)

    def _prepare(self, stacked: dict[str, jax.Array], chunk: int) -> PyTree:
        leaves = {name: stacked[of_chunk] for name, of_chunk in self._names[chunk].items()}
        if not self._scan:
            return leaves
        views = [self._stage.view(i, leaves) for i in self._layers]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *views)

    def _by_name(self, grads: PyTree) -> dict[str, jax.Array]:
        if not self._scan:
            return grads
        named = {}
        for position, index in enumerate(self._layers):
            for path, name in self._stage.layers[index].items():
                leaf = grads
                for key in path:
                    leaf = leaf[key]
                named[name] = leaf[position]
        return named

    def _take(self, at: VirtualStage, params: PyTree) -> PyTree:
        if not self._join:
            return params[at.chunk]
        # A copy of the chunk's parameters in every tick; a switch on the chunk would instead cost the overlap on GPU.
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at.chunk, keepdims=False), params)

    def _offset(self, at: VirtualStage) -> jax.Array:
        """Distance of the layer indices of a virtual stage's trunk from those of the first one's."""
        # Keys fold in a layer's index in the model, so that dropout is the same for any cut.
        return jnp.asarray(self._starts, jnp.int32)[at.index] - self._starts[0]

    def _collections_of(self, at: VirtualStage, collections: PyTree) -> list[PyTree]:
        each = [self._collections.views(self._first_stage, layers, collections) for layers in self._in_chunk]
        if isinstance(at.chunk, int):
            return each[at.chunk]
        return jax.tree.map(lambda *xs: jnp.stack(xs)[at.chunk], *each)

    def _put(self, at: VirtualStage, collections: PyTree, new: list[PyTree]) -> PyTree:
        if isinstance(at.chunk, int):
            return self._collections.put(self._first_stage, self._in_chunk[at.chunk], collections, new)
        for chunk, layers in enumerate(self._in_chunk):
            old = self._collections.views(self._first_stage, layers, collections)
            collections = self._collections.put(
                self._first_stage, layers, collections, select(at.chunk == chunk, new, old)
            )
        return collections

    def _train(self, params: PyTree, inputs: PyTree, context: tuple) -> tuple[PyTree, tuple[PyTree, jax.Array]]:
        y, extras = self._run(params, inputs, context, train=True)
        loss, values = self.aux[0].collect([aux for _, aux in extras], len(self.aux[0].names))
        outputs = (y, loss) if self.aux[0].has_losses else (y,)
        return outputs, ([updated for updated, _ in extras], values)

    def _run(self, params: PyTree, inputs: PyTree, context: tuple, *, train: bool) -> tuple[PyTree, Any]:
        offset, key, side, collections = context
        if not self._scan:
            views = [self._stage.view(i, params) for i in self._layers]
            return self._module.run_layers(self._layers, views, train=train, offset=offset)(
                inputs, key, side, collections
            )
        # Recompute works on groups of layers: the scan's body is a group, so that it is recomputed as one.
        interval = self._module.activation_checkpoint_interval or 1
        group = interval if len(self._layers) % interval == 0 else 1

        def body(x: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            start, views = xs
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], views) for j in range(group)]
            indices = range(self._layers.start, self._layers.start + group)
            run = self._module.run_layers(indices, each, train=train, offset=offset + start)
            return run(x, key, side, collections[:group])[0], None

        starts = jnp.arange(0, len(self._layers), group, dtype=jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), params)
        return jax.lax.scan(body, inputs, (starts, grouped))[0], [({}, {}) for _ in self._layers]
