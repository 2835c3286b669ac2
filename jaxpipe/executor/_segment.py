"""Segments: the prologue, trunk or epilogue of a virtual stage as a function with its backward."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, SplitBackward, split_backward
from jaxpipe.layers import flatten_dict
from jaxpipe.state import Layout, Storage, constrained
from jaxpipe.topology import automatic_axes

from ._batch import samples_spec
from ._blueprint import Blueprint
from ._buffers import zeros_of
from ._reported import ReportedValues
from ._results import BackwardResult, ForwardResult
from ._virtual_stage import VirtualStage


class Segment:
    """Consecutive layers of one virtual stage.

    `layers` has the layers of this segment for each virtual stage, because several virtual stages
    may run the same program. With `scan`, equal layers run as one `lax.scan` over stacked
    parameters. `split` means that the schedule has split backwards.

    Attributes:
        names: Names of the layers' parameters.
        frozen: Names of the parameters that have no gradient.
        num_reported: Length of the vector of reported values, the largest of all virtual stages.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        virtual_stage: int,
        layers: Sequence[range],
        *,
        scan: bool = False,
        split: bool = False,
    ) -> None:
        self._blueprint = blueprint
        self._scan = scan
        self._is_split = split
        self.virtual_stage = virtual_stage
        self.layers = layers[virtual_stage]
        self._starts = [each.start for each in layers]
        self._serves: dict[int, range] = {virtual_stage: self.layers}
        self.stage = blueprint.placement.locations[virtual_stage][0]
        self._leaves = blueprint.params.stages[self.stage]
        self.names = tuple(self._leaves.names_of(self.layers))
        self.frozen = blueprint.params.frozen & frozenset(self.names)
        reported = [
            ReportedValues(blueprint.module.layers, blueprint.trace, each) for each in layers
        ]
        self.aux = reported[virtual_stage]
        self.num_reported = max(len(each.names) for each in reported)

    @functools.cached_property
    def struct(self) -> PyTree:
        """Shapes and dtypes of the parameters that `run` takes."""
        layout = self._blueprint.params.layout
        return jax.eval_shape(
            self.prepare, {name: layout.struct_of(self.stage, name) for name in self.names}
        )

    @functools.cached_property
    def sums(self) -> PyTree:
        """Shapes and dtypes of the parameters' summed gradients; None for frozen ones."""
        params = self._blueprint.params
        sums = {
            name: (params.layout if name in self.frozen else params.grad_layout).struct_of(
                self.stage, name
            )
            for name in self.names
        }
        return self._of_trained(jax.eval_shape(self.prepare, sums))

    @property
    def specs(self) -> PyTree:
        """Shardings of the parameters' gradients over automatic axes; None for frozen ones."""
        return self._of_trained(self._specs_in(self._blueprint.params.grad_layout))

    @property
    def trained(self) -> PyTree:
        """`struct` with None for frozen parameters."""
        return self._of_trained(self.struct)

    def _of_trained(self, tree: PyTree) -> PyTree:
        """Replace the frozen leaves of a tree like `struct` with None."""
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(
            treedef, [None if i in self._frozen_leaves else x for i, x in enumerate(leaves)]
        )

    @functools.cached_property
    def _frozen_leaves(self) -> frozenset[int]:
        """Indices of the frozen parameters among the leaves of `struct`."""
        is_frozen: dict[str, Any] = {name: name in self.frozen for name in self.names}
        # Scanned layers have the same frozen parameters.
        tree = self._views(is_frozen)[0] if self._scan else is_frozen
        return frozenset(i for i, leaf in enumerate(jax.tree.leaves(tree)) if leaf)

    def _specs_in(self, layout: Layout) -> PyTree:
        specs: dict[str, Any] = {name: layout.specs.get(name, P()) for name in self.names}
        # Scanned layers are stacked along a new first dim, and have equal shardings.
        return (
            jax.tree.map(lambda spec: P(None, *spec), self._views(specs)[0])
            if self._scan
            else specs
        )

    @functools.cached_property
    def residuals(self) -> Residuals:
        """Forward and backward in training."""
        trace = self._blueprint.trace
        collections = [trace.collections[i] for i in self.layers]
        context = (jax.ShapeDtypeStruct((), jnp.int32), *self._blueprint.context, collections)
        inputs = trace.boundaries[self.layers.start]
        return Residuals(self._train, self.struct, inputs, context, frozen=self._frozen_leaves)

    @functools.cached_property
    def residual_specs(self) -> list[P]:
        """Shardings of the residuals over automatic axes, as far as they are known."""
        trace = self._blueprint.trace
        if not automatic_axes(trace.mesh):
            return [P() for _ in self.residuals.structs]
        gathered = self._specs_in(self._blueprint.params.gathered)
        params = jax.tree.leaves(gathered)
        inputs = [
            samples_spec(x, trace.mesh, trace.sample_axes)
            for x in jax.tree.leaves(trace.boundaries[self.layers.start])
        ]
        return trace.on_mesh(lambda: self.residuals.specs(params, inputs, trace.mesh))

    @functools.cached_property
    def _reduced_in_turns(
        self,
    ) -> tuple[list[list[int]], Callable[[int, jax.Array], jax.Array] | None]:
        """Per layer the leaves whose gradients are divided over `fsdp` again, and the division."""
        params = self._blueprint.params
        whole = self._specs_in(params.gathered)
        divided = self._specs_in(params.grad_layout)
        # Scanned layers have one backward, whose gradients are complete only at its end. Layers
        # off the trunk run in branches, and `off_trunk` divides their gradients.
        if self._scan or whole == divided or not self._leaves.trunk.keys() >= set(self.names):
            return [], None
        names = sorted(self.names)  # as the leaves of a dictionary are
        reduced = [n for n in names if n not in self.frozen and whole[n] != divided[n]]
        by_layer = [
            [names.index(x) for x in self._leaves.names_of([i]) if x in reduced]
            for i in self.layers
        ]
        return by_layer, lambda i, grad: constrained(grad, divided[names[i]])

    @functools.cached_property
    def split(self) -> SplitBackward | None:
        """The split backward, if the schedule has split backwards."""
        label = ", ".join(self._blueprint.module.layers[i].name for i in self.layers)
        return split_backward(self.residuals, self.struct, label) if self._is_split else None

    @property
    def pending(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the values that a split backward keeps for its weight gradient."""
        return [] if self.split is None else self.split.pending

    def serve(self, virtual_stage: int, layers: range) -> None:
        """Let another virtual stage run this program for its own, equal layers."""
        # Profiles name those layers too.
        self._serves[virtual_stage] = layers

    def take(self, storage: Storage) -> dict[str, jax.Array]:
        """Return the parameters by name, gathered."""
        leaves = {
            name: self._blueprint.params.layout.get(self.stage, name, storage)
            for name in self.names
        }
        return self.gather(leaves) if not self._scan else leaves

    def gather(self, params: PyTree) -> PyTree:
        """Parameters as `run` takes them, whole along `fsdp`, from the form kept through a step."""
        model = self._blueprint.params
        # Not where nothing is divided: the first layer would wait for the weights of the last.
        if self._specs_in(model.layout) == self._specs_in(model.gathered):
            return params
        # Behind a barrier: what does not change from tick to tick XLA would otherwise gather before
        # the loop, and hold.
        params = jax.lax.optimization_barrier(params)
        return jax.tree.map(constrained, params, self._specs_in(model.gathered))

    def prepare(self, leaves: Mapping[str, jax.Array]) -> PyTree:
        """Convert parameters by name to the form that `run` takes."""
        return (
            jax.tree.map(lambda *xs: jnp.stack(xs), *self._views(leaves)) if self._scan else leaves
        )

    def by_name(self, grads: PyTree) -> Mapping[str, jax.Array]:
        """Convert gradients of prepared parameters to gradients by name."""
        if not self._scan:
            return grads
        stacked = {path: leaf for path, leaf in flatten_dict(grads).items() if leaf is not None}
        paths = [(position, self._leaves.layers[i]) for position, i in enumerate(self.layers)]
        return {
            n: stacked[path][position]
            for position, names in paths
            for path, n in names.items()
            if path in stacked
        }

    def collections(self, storage: Storage) -> list[PyTree]:
        """Return the collections of each layer."""
        return self._blueprint.collections.views(self.stage, self.layers, storage)

    def put(self, storage: Storage, new: Sequence[PyTree]) -> Storage:
        """Return the stage's collections with those of these layers replaced."""
        return self._blueprint.collections.put(self.stage, self.layers, storage, new)

    def offset(self, at: VirtualStage) -> jax.Array:
        """Return the offset from this program's layer indices to those of the virtual stage."""
        # Keys fold in a layer's index in the model, so dropout does not depend on the cut.
        return jnp.asarray(self._starts, jnp.int32)[at.index] - self.layers.start

    def run(
        self, params: PyTree, inputs: PyTree, context: tuple[Any, ...], *, train: bool
    ) -> tuple[PyTree, Sequence[tuple[Any, ...]]]:
        """Run the layers; return the outputs, and each layer's collections and reported values."""
        # `params` have the form that `prepare` returns.
        module = self._blueprint.module
        (offset, key, side, collections) = context
        if not self._scan:
            labels = [self._label(i, i + 1) for i in range(len(self.layers))]
            run = module.run_layers(
                self.layers, self._views(params), train=train, offset=offset, labels=labels
            )
            return run(inputs, key, side, collections)
        # Recompute works on groups of layers. The scan's body is a group, so that a group is
        # recomputed as a whole.
        interval = module.activation_checkpoint_interval or 1
        group = interval if len(self.layers) % interval == 0 else 1

        def body(x: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            start, views = xs
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], views) for j in range(group)]
            labels = [self._label(j, None, group) for j in range(group)]
            run = module.run_layers(
                self.layers[:group], each, train=train, offset=offset + start, labels=labels
            )
            return run(x, key, side, collections[:group])[0], None

        starts = jnp.arange(0, len(self.layers), group, dtype=jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), params)
        return jax.lax.scan(body, inputs, (starts, grouped))[0], [({}, {}) for _ in self.layers]

    def forward(self, params: PyTree, inputs: PyTree, context: tuple[Any, ...]) -> ForwardResult:
        """Run the layers in training."""
        (y, *_), (new, values), residuals = self.residuals.forward(params, inputs, context)
        return ForwardResult(y, residuals, new, values)

    def backward(
        self,
        params: PyTree,
        residuals: list[jax.Array],
        gradient: list[jax.Array],
        reported_cotangent: jax.Array,
        *,
        split: bool,
    ) -> BackwardResult:
        """Run the layers' backward, whole or without the weight gradients that can wait."""
        # The losses that layers report are one more output, so their gradients need no separate
        # backward pass.
        cotangents = [*gradient, *([reported_cotangent] if self.aux.has_losses else [])]
        if split and self.split is not None:
            return BackwardResult(*self.split.backward_input(params, residuals, cotangents))
        groups, reduce = self._reduced_in_turns
        grads, input_grad = self.residuals.backward(params, residuals, cotangents, groups, reduce)
        return BackwardResult(grads, input_grad, zeros_of(self.pending))

    def divided(
        self, leaves: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Divide parameters by name into trained and frozen ones."""
        trained = {name: leaf for name, leaf in leaves.items() if name not in self.frozen}
        return trained, {name: leaf for name, leaf in leaves.items() if name in self.frozen}

    def backward_weight(
        self, params: PyTree, residuals: list[jax.Array], pending: list[jax.Array]
    ) -> PyTree:
        """Compute the gradients that a split backward left."""
        assert self.split is not None
        return self.split.backward_weight(params, residuals, pending)

    def off_trunk(self, grads: Mapping[str, jax.Array | None]) -> Storage:
        """Convert gradients to the form of a stage's sums off the trunk; missing ones are zeros."""
        params = self._blueprint.params
        # First whole along `fsdp`, then divided: to reshard from another axis to `fsdp`, XLA would
        # move slices between devices, here inside a branch.
        specs = params.gathered.specs
        given = {
            name: constrained(grad, specs.get(name, P()))
            for name, grad in grads.items()
            if grad is not None
        }
        layout = params.grad_layout
        # Fresh zeros instead of the running sums: values that pass through a branch are copied in
        # full in every tick.
        common = {
            name: given[name].astype(like.dtype)
            if name in given
            else jnp.zeros(like.shape, like.dtype)
            for name, like in layout.stacked.items()
            if name in params.stacked_off_trunk
        }
        # Packed gradients keep the dtype that their layers compute in, if all gradients of a buffer
        # share it: float32 sums are twice as wide as bfloat16 gradients.
        return Storage(layout.pack_buffers(self.stage, given, params.grad_dtypes), common)

    def _label(self, start: int, stop: int | None, step: int = 1) -> str:
        """Return the name in profiles of some layers, in all virtual stages of this program."""
        layers = self._blueprint.module.layers
        each = [
            layers[i].name for of_stage in self._serves.values() for i in of_stage[start:stop:step]
        ]
        return ",".join(dict.fromkeys(each))

    def _views(self, leaves: Mapping[str, jax.Array]) -> list[PyTree]:
        return [self._leaves.view(i, leaves) for i in self.layers]

    def _train(
        self, params: PyTree, inputs: PyTree, context: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[list[PyTree], jax.Array]]:
        y, extras = self.run(params, inputs, context, train=True)
        loss, values = self.aux.collect([reported for _, reported in extras], self.num_reported)
        return (y, loss) if self.aux.has_losses else (y,), ([new for new, _ in extras], values)
