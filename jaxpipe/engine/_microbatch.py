"""A training step in several calls: forward of one microbatch at a time, then the update."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.errors import PipelineError
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import TrainState

from ._source import Batch

Metrics = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Share:
    """What some microbatches of a step add to it; the shares of a step are added up leaf by leaf.

    What `(sum, weight)` losses are divided by is known only after the last microbatch, so a share holds sums.

    Attributes:
        gradients: Gradients of `loss` over the number of microbatches in a step, in the form of `TrainState.params`.
        loss: Sum of the losses, not yet divided by any weight.
        weight: How many losses that is the mean of, or the sum of the weights that `loss_fn` returns.
        reported: What layers reported, summed over microbatches.
        count: Number of microbatches.
    """

    gradients: PyTree
    loss: jax.Array
    weight: jax.Array
    reported: PyTree
    count: jax.Array


@functools.partial(jax.jit, donate_argnums=0)
def add_shares(total: Share, share: Share) -> Share:
    """The share of the microbatches of both; the first is donated."""
    return jax.tree.map(jnp.add, total, share)


def compile_forward(pipeline: Pipeline, num_microbatches: int) -> Callable[..., tuple[PyTree, Share, jax.Array]]:
    """Make the function that a step calls for each of its microbatches.

    Layers see the cotangent of the mean over the step's microbatches, as they do in a whole batch. Where losses are
    `(sum, weight)`, the weights of microbatches that are still to come are taken to be that of the present one: only a
    layer whose backward is not linear can tell.

    Args:
        pipeline: A pipeline of one microbatch.
        num_microbatches: Microbatches per step.

    Returns:
        `forward(state, batch, index) -> (collections, share, loss)`, jitted; `index` is the microbatch's place in the
        step.

    Raises:
        PipelineError: The loss is `(sum, weight)`, layers add losses to it, and a step has several microbatches.
    """
    if num_microbatches > 1:
        _check_aux_losses(pipeline, num_microbatches)

    def forward(state: TrainState, batch: Batch, index: jax.Array) -> tuple[PyTree, Share, jax.Array]:
        metrics, gradients, collections = pipeline.partial_gradients(state, batch, index, np.int32(num_microbatches))
        loss, weight = metrics["loss"], metrics["weight"]
        divisor = _divisor(weight)
        gradients = jax.tree.map(lambda g: g * divisor.astype(g.real.dtype), gradients)
        reported = {kind: metrics[kind] for kind in ("losses", "metrics") if kind in metrics}
        return collections, Share(gradients, loss * divisor, weight, reported, jnp.int32(1)), loss

    return jax.jit(forward)


def compile_update(pipeline: Pipeline) -> Callable[[TrainState, PyTree, Share], tuple[TrainState, Metrics]]:
    """Make the function that ends a step.

    Args:
        pipeline: Any pipeline with states of this form.

    Returns:
        `update(state, collections, share) -> (state, metrics)`, jitted, the state donated: clips and applies the mean
        gradient. `collections` are those before the step, to which a step whose gradients overflowed goes back.
    """

    def update(state: TrainState, collections: PyTree, total: Share) -> tuple[TrainState, Metrics]:
        divisor = _divisor(total.weight)
        after = state.collections
        # Each share was divided by the number of shares, as if they weighed alike; now that all weights are known,
        # it is their sum that divides.
        gradients = jax.tree.map(lambda g: g * (total.count / divisor).astype(g.real.dtype), total.gradients)
        state, metrics = pipeline.update(state, gradients)
        if "overflow" in metrics:
            after = jax.tree.map(lambda old, new: jnp.where(metrics["overflow"], old, new), collections, after)
        reported = jax.tree.map(lambda x: x / total.count, total.reported)
        metrics |= {"loss": total.loss / divisor, "weight": total.weight, **reported}
        return dataclasses.replace(state, collections=after), metrics

    of_state = jax.tree.map(lambda x: x.sharding, pipeline.state_struct)
    return jax.jit(update, donate_argnums=0, out_shardings=(of_state, None))


def _divisor(weight: jax.Array) -> jax.Array:
    """What a sum of losses is divided by, here and in the pipeline: 1 where nothing weighs."""
    return jnp.where(weight == 0, 1.0, weight)


def _check_aux_losses(pipeline: Pipeline, num_microbatches: int) -> None:
    module, trace = pipeline.module, pipeline.trace
    names = [f"{named.name}/{name}" for named in module.layers for name in trace.aux[named.index].get("losses", ())]
    size, labels = pipeline.microbatch_size, pipeline.batch_struct[1]
    labels = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[2:]), x.dtype), labels)
    if names and jax.eval_shape(module.loss_terms, trace.boundaries[-1], labels)[1] is not None:
        raise PipelineError(
            "a loss_fn that returns (sum, weight) must be alone in a step of several forward calls, but got "
            f"gradient_accumulation_steps={num_microbatches} and the layers' loss {names[0]!r}, which all microbatches "
            "share evenly. Call train_batch(data_iter), or let loss_fn return a mean."
        )
