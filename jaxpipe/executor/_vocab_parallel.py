"""Vocabulary-parallel layers: the ends of a model run by all stages at once, each with its shards of the parameters.

With `check_vma=False` the transpose of a `psum` is a `psum`, so a backward gives every stage the gradient of the sum of
the cotangents of all stages. These therefore are zero on all stages but one: that of the virtual stage which borders on
the end. The gradients of what is the same on all stages are summed over the stages afterwards.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import differentiable, replace_differentiable
from jaxpipe.errors import LayerError
from jaxpipe.jaxpr import output_dependence
from jaxpipe.layers import format_struct

from ._batch import Context
from ._blueprint import Blueprint
from ._buffers import select, zeros_of

_AXIS = "stage"
Leaves = dict[str, jax.Array]
"""Parameters, or their gradients, by name."""


class _VocabParallel:
    """Layers at one end of the model that all stages run at once.

    Args:
        blueprint: The model, cut.
        layers: The layers, in order.
    """

    def __init__(self, blueprint: Blueprint, layers: range) -> None:
        self._module, self._trace, self._layers = blueprint.module, blueprint.trace, layers
        self._num_stages = blueprint.placement.num_stages
        self._stage = blueprint.params.stages[0]
        self._struct = {name: blueprint.params.layout.stacked[name] for name in self._stage.names_of(layers)}
        self.outputs_struct = self._traced(blueprint.context)

    def _traced(self, context: Context) -> PyTree:
        """Shapes and dtypes of the output on a stage."""
        inputs, names = self._trace.boundaries[self._layers.start], [self._module.layers[i].name for i in self._layers]
        try:
            run = functools.partial(self._run, self._layers, train=False)
            return self._abstract(run, self._struct, inputs, context)[1]
        except Exception as error:
            raise LayerError(
                f"the layers {', '.join(names)}, which all stages run together, must accept slices of the parameters "
                f"whose partition metadata names 'stage', but got {format_struct(self._struct)} and failed with "
                f"{type(error).__name__}: {error}. Use VocabEmbed and VocabHead of jaxpipe.layers, or leave 'stage' "
                "out of the metadata."
            ) from error

    def _abstract(self, function: Any, *args: PyTree) -> tuple[Any, PyTree]:
        return jax.make_jaxpr(function, return_shape=True)(*args)

    def _take(self, storage: PyTree, layers: range) -> Leaves:
        return {name: storage.stacked[name] for name in self._stage.names_of(layers)}

    def _run(self, layers: range, leaves: Leaves, inputs: PyTree, context: Context, *, train: bool) -> PyTree:
        views = [self._stage.view(i, leaves) for i in layers]
        return self._module.run_layers(layers, views, train=train)(inputs, *context, [{} for _ in layers])[0]


class VocabInput(_VocabParallel):
    """The first layers, without residuals: their backward runs their forward again.

    Raises:
        LayerError: A layer does not accept slices, or the output is not whole on every stage.
    """

    def __init__(self, blueprint: Blueprint, layers: range) -> None:
        super().__init__(blueprint, layers)
        wanted, found = format_struct(blueprint.trace.boundaries[layers.stop]), format_struct(self.outputs_struct)
        if wanted != found:
            raise LayerError(
                f"layer {blueprint.module.layers[layers.stop - 1].name}, which all stages run together, must hand over "
                f"{wanted} on every stage, but got {found}. Put its slices together with a psum or an all_gather over "
                "'stage'."
            )

    def outputs(self, storage: PyTree, inputs: PyTree, context: Context, *, train: bool) -> PyTree:
        """Outputs of the layers; `inputs` and `context` must be the same on all stages."""
        return self._run(self._layers, self._take(storage, self._layers), inputs, context, train=train)

    def gradients(self, storage: PyTree, inputs: PyTree, context: Context, gradient: Sequence[jax.Array]) -> Leaves:
        """Gradients of the parameters by name, from those of the output, zero on all stages but one."""

        def outputs(leaves: Leaves) -> list[jax.Array]:
            return differentiable(self._run(self._layers, leaves, inputs, context, train=True))

        # The forward runs again: an embedding's is a lookup, cheaper than a ring of its residuals.
        return jax.vjp(outputs, self._take(storage, self._layers))[1](list(gradient))[0]


class VocabLoss(_VocabParallel):
    """The last layers and the loss, as one fused value and gradient.

    Only from the first split layer on do all stages compute the same. The layers before it count on the last stage, the
    one that holds the last part, and what they hand over is then given to all: the cotangent of what all stages have
    is, on each of them, a share of the whole, and a layer whose backward is not linear must not see shares. Within a
    split layer it does: what `VocabHead` is given by its own layer has the cotangent of one slice of the logits.
    """

    def __init__(self, blueprint: Blueprint, layers: range) -> None:
        super().__init__(blueprint, layers)
        first = next(i for i in layers if blueprint.trace.stage_dims[i])
        self._unsharded, self._sharded = range(layers.start, first), range(first, layers.stop)

    def check_loss(self, labels: PyTree) -> None:
        """Refuse a loss that takes a stage's slice of the outputs for the whole.

        Args:
            labels: Shapes and dtypes of a microbatch's labels.

        Raises:
            LayerError: Outputs are slices, and the loss has no collectives over the stages.
        """
        whole = self._trace.boundaries[-1]
        if format_struct(self.outputs_struct) == format_struct(whole):
            return
        closed = self._abstract(self._module.loss_terms, self.outputs_struct, labels)[0]
        bits = [int(i < len(jax.tree.leaves(whole))) for i in range(len(closed.jaxpr.invars))]
        has_axis = any(getattr(effect, "name", None) == _AXIS for effect in closed.effects)
        if not has_axis and any(output_dependence(closed.jaxpr, bits)):
            raise LayerError(
                f"loss_fn must take slices of the model's output, {format_struct(self.outputs_struct)} of "
                f"{format_struct(whole)} on each of num_stages={self._num_stages} stages, but got one without "
                "collectives over 'stage'. Use vocab_cross_entropy of jaxpipe.layers, or a head that is not split."
            )

    def outputs_of(self, storage: PyTree, is_last: jax.Array, inputs: PyTree, context: Context) -> PyTree:
        """The model's output on this stage, outside training.

        Args:
            storage: This stage's parameters.
            is_last: Whether this stage holds the last part; its `inputs` count.
            inputs: The trunk's output.
            context: The microbatch's key and side inputs.
        """
        params = self._take(storage, self._unsharded), self._take(storage, self._sharded)
        return self._outputs(is_last, *params, inputs, context, train=False)

    def whole(self, outputs: PyTree) -> PyTree:
        """Outputs put together from those of all stages."""

        def one(leaf: jax.Array, like: Any) -> jax.Array:
            dims = [d for d, (n, whole) in enumerate(zip(leaf.shape, like.shape, strict=True)) if n != whole]
            return jax.lax.all_gather(leaf, _AXIS, axis=dims[0], tiled=True) if dims else leaf

        return jax.tree.map(one, outputs, self._trace.boundaries[-1])

    def loss_and_gradients(
        self,
        storage: PyTree,
        is_last: jax.Array,
        inputs: PyTree,
        labels: PyTree,
        context: Context,
        cotangent: jax.Array,
    ) -> tuple[jax.Array, Leaves, list[jax.Array]]:
        """The loss of one microbatch with its gradients.

        Args:
            storage: This stage's parameters.
            is_last: Whether this stage holds the last part; its `inputs` count.
            inputs: The trunk's output.
            labels: The microbatch's labels, on all stages.
            context: The microbatch's key and side inputs, on all stages.
            cotangent: What the loss is multiplied with before differentiation.

        Returns:
            `(loss, gradients of the parameters by name, gradients of the differentiable inputs)`; loss and gradients
            of inputs are zero on all stages but the one that holds the last part.
        """

        def scaled_loss(unsharded: Leaves, sharded: Leaves, values: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            inputs_now = replace_differentiable(inputs, values)
            outputs = self._outputs(is_last, unsharded, sharded, inputs_now, context, train=True)
            # Every stage computes the whole loss. One of them starts the backward: with all, psums would add them up.
            loss = jnp.where(is_last, self._module.loss_terms(outputs, labels)[0].astype(jnp.float32), 0.0)
            return loss * cotangent, loss

        params = self._take(storage, self._unsharded), self._take(storage, self._sharded)
        gradient = jax.grad(scaled_loss, argnums=(0, 1, 2), has_aux=True)
        (unsharded, sharded, dx), loss = gradient(*params, differentiable(inputs))
        # Elsewhere the layers before the sharded one ran on garbage: selected away, as NaN * 0 would stay NaN.
        unsharded, dx = select(is_last, (unsharded, dx), zeros_of((unsharded, dx)))
        # A parameter tied between layers of the two kinds has a gradient from each.
        both = {name: unsharded[name] + sharded[name] for name in unsharded.keys() & sharded.keys()}
        return loss, {**unsharded, **sharded, **both}, dx

    def _outputs(
        self, is_last: jax.Array, unsharded: Leaves, sharded: Leaves, inputs: PyTree, context: Context, *, train: bool
    ) -> PyTree:
        handed = self._run(self._unsharded, unsharded, inputs, context, train=train)
        return self._run(self._sharded, sharded, _from_last(is_last, handed), context, train=train)


def _from_last(is_last: jax.Array, tree: PyTree) -> PyTree:
    """Value of the last stage, on all stages."""

    def one(leaf: jax.Array) -> jax.Array:
        # A psum of zeros and one value is a broadcast whose transpose sends the cotangent back.
        number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        total = jax.lax.psum(jnp.where(is_last, number, jnp.zeros((), number.dtype)), _AXIS)
        return total.astype(leaf.dtype)

    return jax.tree.map(one, tree)
