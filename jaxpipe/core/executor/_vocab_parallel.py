"""Vocabulary-parallel layers: first or last layers that all stages run together.

Each stage has its own shards of the parameters.

With `check_vma=False` the transpose of a `psum` is a `psum`, so a backward gives every stage the
gradient of the sum of all stages' cotangents. The cotangents are therefore zero on all stages but
the one that holds the first or the last virtual stage. Gradients of replicated parameters are
summed over the stages afterwards.
"""

import functools
import logging

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage
from jaxpipe.distributed import log
from jaxpipe.distributed.topology import broadcast_sum
from jaxpipe.errors import LayerError
from jaxpipe.layers import check_split_loss, format_struct, with_split_logits
from jaxpipe.layers.losses import put_together
from jaxpipe.programs.autodiff import differentiable, replace_differentiable
from jaxpipe.programs.jaxpr import effect_axes

from ._arrays import ByName, Packed
from ._batch import Context, Microbatch
from ._blueprint import Blueprint
from ._buffers import select, zeros_of
from ._packing import Packing
from ._results import LossResult
from ._segment_program import SegmentProgram

_AXIS = "stage"


class VocabInput:
    """The first layers, without residuals: their backward runs the forward again."""

    def __init__(self, blueprint: Blueprint, layers: range, gradients: Packing) -> None:
        self._gradients = gradients
        # The last member of the common form is the gradient of these layers' output.
        self._member = len(blueprint.cuts)
        self._program = SegmentProgram(blueprint, 0, [layers])
        wanted = format_struct(blueprint.trace.boundaries[layers.stop])
        found = format_struct(_outputs_struct(blueprint, self._program))
        if wanted != found:
            raise LayerError(
                f"layer {blueprint.module.layers[layers.stop - 1].name}, which all stages run "
                f"together, must hand over {wanted} on every stage, but got {found}. Combine its "
                "slices with a psum or an all_gather over 'stage'."
            )

    def outputs(self, storage: Storage, inputs: PyTree, context: Context, *, train: bool) -> PyTree:
        """Run the layers; `inputs` and `context` must be the same on all stages."""
        return _run(
            self._program, self._program.segment.take(storage), inputs, context, train=train
        )

    def gradients(
        self, storage: Storage, inputs: PyTree, context: Context, gradient: Packed
    ) -> ByName:
        """Compute gradients by name. `gradient` is zero except at the first virtual stage."""
        given = self._gradients.unpack(self._member, gradient)
        trained, frozen = self._program.segment.divided(self._program.segment.take(storage))

        def outputs(trained: ByName) -> list[jax.Array]:
            return differentiable(
                _run(self._program, {**trained, **frozen}, inputs, context, train=True)
            )

        # The forward runs again: for an embedding it is a lookup, cheaper than a ring of residuals.
        return jax.vjp(outputs, trained)[1](given)[0]


class VocabLoss:
    """The last layers and the loss, with value and gradient fused.

    All stages compute the same from the first split layer on. The layers before it are only valid
    on the stage that holds the last virtual stage, and their output is broadcast to all stages. The
    reason is the cotangent: for a value that all stages have, each stage's cotangent is only a part
    of the whole, and a layer whose backward is not linear must not see parts. Within a split layer
    it does see them: the input that `VocabHead` gets from its own layer has the cotangent of one
    slice of the logits.
    """

    def __init__(
        self, blueprint: Blueprint, layers: range, activations: Packing, gradients: Packing
    ) -> None:
        self._activations = activations
        self._gradients = gradients
        self._last = len(blueprint.cuts) - 1
        self._module = blueprint.module
        self._whole = blueprint.trace.boundaries[-1]
        self._last_stage = blueprint.placement.locations[-1][0]
        self._outputs_struct = _outputs_struct(blueprint, SegmentProgram(blueprint, 0, [layers]))
        self._gathers = False  # whether the loss needs complete logits
        first = next(i for i in layers if blueprint.trace.stage_dims[i])
        self._unsharded = SegmentProgram(blueprint, 0, [range(layers.start, first)])
        self._sharded = SegmentProgram(blueprint, 0, [range(first, layers.stop)])

    def check_loss(self, labels: PyTree) -> None:
        """Find out from shapes of labels whether the loss accepts slices of the outputs."""
        if format_struct(self._outputs_struct) == format_struct(self._whole):
            return
        try:
            check_split_loss(self._module, self._outputs_struct, self._whole, labels)
        except LayerError as error:
            # A loss with its own collectives over the stages cannot be given whole outputs on each
            # of them.
            if _AXIS in effect_axes(jax.make_jaxpr(self._module.loss_terms)(self._whole, labels)):
                raise
            self._gathers = True
            log(
                logging.WARNING,
                "the logits are put together on every stage for the loss, which costs time and "
                "memory: %s",
                error,
            )

    def outputs(self, storage: Storage, output: Packed, context: Context) -> PyTree:
        """Compute this stage's slices of the model's output as `SplitLogits`, outside training."""
        inputs = self._activations.unpack(self._last, output)
        params = self._unsharded.segment.take(storage), self._sharded.segment.take(storage)
        return self._outputs(*params, inputs, context, train=False)

    def whole(self, outputs: PyTree) -> PyTree:
        """Gather the complete outputs from the slices of all stages."""
        return jax.tree.map(put_together, outputs)

    def loss_and_gradients(
        self,
        storage: Storage,
        is_last: jax.Array,
        output: Packed,
        batch: Microbatch,
        cotangent: jax.Array,
    ) -> LossResult:
        """Compute a microbatch's loss and gradients by name, from the trunk's packed output."""
        # The output is only valid where `is_last` is true: on the stage of the last virtual stage.
        # Elsewhere the loss sums and the output's gradient are zero. All stages have the same
        # labels.
        inputs = self._activations.unpack(self._last, output)

        def scaled_loss(
            unsharded: ByName, sharded: ByName, values: list[jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            inputs_now = replace_differentiable(inputs, values)
            leaves = {**unsharded, **frozen[0]}, {**sharded, **frozen[1]}
            outputs = self._outputs(*leaves, inputs_now, batch.context, train=True)
            # Every stage computes the whole loss, but only one of them starts the backward:
            # otherwise psums would add the cotangents of all stages.
            sums = jnp.where(is_last, self._module.loss_terms(outputs, batch.labels).sums(), 0.0)
            return sums[0] * cotangent, sums

        segments = self._unsharded.segment, self._sharded.segment
        parts = [segment.divided(segment.take(storage)) for segment in segments]
        trained, frozen = zip(*parts, strict=True)
        gradient = jax.grad(scaled_loss, argnums=(0, 1, 2), has_aux=True)
        (unsharded, sharded, dx), sums = gradient(*trained, differentiable(inputs))
        # Elsewhere the layers before the sharded one ran on garbage. A select removes it, because
        # NaN * 0 would stay NaN.
        unsharded, dx = select(is_last, (unsharded, dx), zeros_of((unsharded, dx)))
        # A parameter that is tied between layers of both kinds has a gradient from each.
        both = {name: unsharded[name] + sharded[name] for name in unsharded.keys() & sharded.keys()}
        output_grad = self._gradients.pack(self._last, dx)
        return LossResult(sums, {**unsharded, **sharded, **both}, output_grad)

    def _outputs(
        self, unsharded: ByName, sharded: ByName, inputs: PyTree, context: Context, *, train: bool
    ) -> PyTree:
        handed = _run(self._unsharded, unsharded, inputs, context, train=train)
        # The transpose of this broadcast sends the cotangent back to the last stage. The broadcast
        # is a sum with zeros, which moves twice the bytes of a collective-broadcast. But XLA (JAX
        # 0.10) schedules a program that contains a collective-broadcast without estimates of
        # exchange times, so that matrix products overlap fewer exchanges.
        is_source = jax.lax.axis_index(_AXIS) == self._last_stage
        handed = broadcast_sum(select(is_source, handed, zeros_of(handed)), _AXIS)
        outputs = _run(self._sharded, sharded, handed, context, train=train)
        outputs = with_split_logits(outputs, self._whole)
        return self.whole(outputs) if self._gathers else outputs


def _outputs_struct(blueprint: Blueprint, program: SegmentProgram) -> PyTree:
    """Return shapes and dtypes of some layers' output on each of the stages that run them."""
    segment = program.segment
    inputs = blueprint.trace.boundaries[segment.layers.start]
    layers = blueprint.module.layers
    try:
        run = functools.partial(_run, program, train=False)
        return jax.eval_shape(run, segment.struct, inputs, blueprint.context)
    except Exception as error:
        raise LayerError(
            f"the layers {', '.join(layers[i].name for i in segment.layers)}, which all stages run "
            "together, must accept slices of the parameters whose partition metadata names "
            f"'stage', but got {format_struct(segment.struct)} and failed with "
            f"{type(error).__name__}: {error}. Use VocabEmbed and VocabHead of jaxpipe.layers, or "
            "leave 'stage' out of the metadata."
        ) from error


def _run(
    program: SegmentProgram, leaves: ByName, inputs: PyTree, context: Context, *, train: bool
) -> PyTree:
    full_context = (0, *context, [{} for _ in program.segment.layers])
    return program.run(leaves, inputs, full_context, train=train)[0]
