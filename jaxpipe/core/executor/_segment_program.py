"""Programs of segments: their forward and backward, which several virtual stages may run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import constrained
from jaxpipe.distributed.topology import automatic_axes
from jaxpipe.programs.autodiff import Residuals, SplitBackward, split_backward

from ._arrays import Prepared
from ._batch import samples_spec
from ._blueprint import Blueprint
from ._buffers import zeros_of
from ._reported import ReportedValues
from ._results import BackwardResult, ForwardResult
from ._segment import Segment
from ._virtual_stage import VirtualStage


class SegmentProgram:
    """Forward and backward of a virtual stage's segment.

    `layers` has the layers of such a segment for each virtual stage, because several virtual stages
    may run the same program. With `scan`, equal layers run as one `lax.scan` over stacked
    parameters. `split` means that the schedule has split backwards.

    Attributes:
        segment: The layers, and the forms of their parameters.
        aux: The values that the layers report.
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
        self._is_split = split
        self.virtual_stage = virtual_stage
        stage = blueprint.placement.locations[virtual_stage][0]
        self.segment = Segment(blueprint, stage, layers[virtual_stage], scan=scan)
        self._starts = [each.start for each in layers]
        self._serves: dict[int, range] = {virtual_stage: self.segment.layers}
        reported = [
            ReportedValues(blueprint.module.layers, blueprint.trace, each) for each in layers
        ]
        self.aux = reported[virtual_stage]
        self.num_reported = max(len(each.names) for each in reported)

    @functools.cached_property
    def residuals(self) -> Residuals:
        """Forward and backward in training."""
        segment = self.segment
        trace = self._blueprint.trace
        collections = [trace.collections[i] for i in segment.layers]
        context = (jax.ShapeDtypeStruct((), jnp.int32), *self._blueprint.context, collections)
        inputs = trace.boundaries[segment.layers.start]
        return Residuals(self._train, segment.struct, inputs, context, frozen=segment.frozen_leaves)

    @functools.cached_property
    def residual_specs(self) -> list[P]:
        """Shardings of the residuals over automatic axes, as far as they are known."""
        trace = self._blueprint.trace
        if not automatic_axes(trace.mesh):
            return [P() for _ in self.residuals.structs]
        gathered = self.segment.specs_in(self._blueprint.params.gathered)
        params = jax.tree.leaves(gathered)
        inputs = [
            samples_spec(x, trace.mesh, trace.sample_axes)
            for x in jax.tree.leaves(trace.boundaries[self.segment.layers.start])
        ]
        return trace.on_mesh(lambda: self.residuals.specs(params, inputs, trace.mesh))

    @functools.cached_property
    def _reduced_in_turns(
        self,
    ) -> tuple[list[list[int]], Callable[[int, jax.Array], jax.Array] | None]:
        """Per layer the leaves whose gradients are divided over `fsdp` again, and the division."""
        segment = self.segment
        params = self._blueprint.params
        whole = segment.specs_in(params.gathered)
        divided = segment.specs_in(params.grad_layout)
        # Scanned layers have one backward, whose gradients are complete only at its end. Layers
        # off the trunk run in branches, and `off_trunk` divides their gradients.
        if (
            segment.is_scanned
            or whole == divided
            or not segment.leaves.trunk.keys() >= set(segment.names)
        ):
            return [], None
        names = sorted(segment.names)  # as the leaves of a dictionary are
        reduced = [n for n in names if n not in segment.frozen and whole[n] != divided[n]]
        by_layer = [
            [names.index(x) for x in segment.leaves.names_of([i]) if x in reduced]
            for i in segment.layers
        ]
        return by_layer, lambda i, grad: constrained(grad, divided[names[i]])

    @functools.cached_property
    def split(self) -> SplitBackward | None:
        """The split backward, if the schedule has split backwards."""
        label = ", ".join(self._blueprint.module.layers[i].name for i in self.segment.layers)
        return (
            split_backward(self.residuals, self.segment.struct, label) if self._is_split else None
        )

    @property
    def pending(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the values that a split backward keeps for its weight gradient."""
        return [] if self.split is None else self.split.pending

    def serve(self, virtual_stage: int, layers: range) -> None:
        """Let another virtual stage run this program for its own, equal layers."""
        # Profiles name those layers too.
        self._serves[virtual_stage] = layers

    def offset(self, at: VirtualStage) -> jax.Array:
        """Return the offset from this program's layer indices to those of the virtual stage."""
        # Keys fold in a layer's index in the model, so dropout does not depend on the cut.
        return jnp.asarray(self._starts, jnp.int32)[at.index] - self.segment.layers.start

    def run(
        self, params: Prepared, inputs: PyTree, context: tuple[Any, ...], *, train: bool
    ) -> tuple[PyTree, Sequence[tuple[Any, ...]]]:
        """Run the layers; return the outputs, and each layer's collections and reported values."""
        # `params` are prepared.
        module = self._blueprint.module
        segment = self.segment
        layers = segment.layers
        (offset, key, side, collections) = context
        if not segment.is_scanned:
            labels = [self._label(i, i + 1) for i in range(len(layers))]
            run = module.run_layers(
                layers, segment.views(params), train=train, offset=offset, labels=labels
            )
            return run(inputs, key, side, collections)
        # Recompute works on groups of layers. The scan's body is a group, so that a group is
        # recomputed as a whole.
        interval = module.activation_checkpoint_interval or 1
        group = interval if len(layers) % interval == 0 else 1

        def body(x: PyTree, xs: tuple[jax.Array, PyTree]) -> tuple[PyTree, None]:
            start, views = xs
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], views) for j in range(group)]
            labels = [self._label(j, None, group) for j in range(group)]
            run = module.run_layers(
                layers[:group], each, train=train, offset=offset + start, labels=labels
            )
            return run(x, key, side, collections[:group])[0], None

        starts = jnp.arange(0, len(layers), group, dtype=jnp.int32)
        grouped = jax.tree.map(lambda leaf: leaf.reshape(-1, group, *leaf.shape[1:]), params)
        return jax.lax.scan(body, inputs, (starts, grouped))[0], [({}, {}) for _ in layers]

    def forward(self, params: Prepared, inputs: PyTree, context: tuple[Any, ...]) -> ForwardResult:
        """Run the layers in training."""
        (y, *_), (new, values), residuals = self.residuals.forward(params, inputs, context)
        return ForwardResult(y, residuals, new, values)

    def backward(
        self,
        params: Prepared,
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

    def backward_weight(
        self, params: Prepared, residuals: list[jax.Array], pending: list[jax.Array]
    ) -> Prepared:
        """Compute the gradients that a split backward left."""
        assert self.split is not None
        return self.split.backward_weight(params, residuals, pending)

    def _label(self, start: int, stop: int | None, step: int = 1) -> str:
        """Return the name in profiles of some layers, in all virtual stages of this program."""
        layers = self._blueprint.module.layers
        each = [
            layers[i].name for of_stage in self._serves.values() for i in of_stage[start:stop:step]
        ]
        return ",".join(dict.fromkeys(each))

    def _train(
        self, params: Prepared, inputs: PyTree, context: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[list[PyTree], jax.Array]]:
        y, extras = self.run(params, inputs, context, train=True)
        loss, values = self.aux.collect([reported for _, reported in extras], self.num_reported)
        return (y, loss) if self.aux.has_losses else (y,), ([new for new, _ in extras], values)
