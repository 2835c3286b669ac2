"""A training step in several calls: forward of one microbatch at a time, then the update."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.core.executor import (
    Metrics,
    PartialMetrics,
    ReportedMetrics,
    collections_after,
    loss_divisor,
)
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import TrainState
from jaxpipe.data import Batch
from jaxpipe.errors import PipelineError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientAccumulator:
    """Sums over the microbatches of a step that have been trained so far.

    A step over a whole batch divides by the total weight of its microbatches before it
    differentiates. Here the weights of later microbatches are not known yet. So each microbatch is
    divided by its own weight, `Programs.partial_gradients` multiplies its gradients by that weight
    again, and `mean` divides the sum by the total weight.

    Attributes:
        gradients: Gradients of `loss` divided by the number of microbatches in a step, with the
            structure of `TrainState.params`.
        loss: Sum of the losses, not yet divided by any weight.
        weight: Number of losses in the sum, or the sum of the weights that `loss_fn` returns.
        of_loss: Sums of the metrics that `loss_fn` returns, weighted like the loss.
        reported: Losses and metrics that layers reported, summed over microbatches.
        count: Number of microbatches.
    """

    gradients: PyTree
    loss: jax.Array
    weight: jax.Array
    of_loss: dict[str, jax.Array]
    reported: ReportedMetrics
    count: jax.Array

    @classmethod
    def of_microbatch(
        cls, metrics: PartialMetrics, gradients: PyTree, loss_metrics: Collection[str]
    ) -> "GradientAccumulator":
        """Return the sums over one microbatch from the result of `Programs.partial_gradients`."""
        weight = metrics["weight"]
        divisor = loss_divisor(weight)  # 1 for a microbatch of weight 0
        reported: ReportedMetrics = {}
        if "losses" in metrics:
            reported["losses"] = metrics["losses"]
        values = metrics.get("metrics", {})
        if of_layers := {name: x for name, x in values.items() if name not in loss_metrics}:
            reported["metrics"] = of_layers
        of_loss = {name: values[name] * divisor for name in loss_metrics}
        return cls(gradients, metrics["loss"] * divisor, weight, of_loss, reported, jnp.int32(1))

    @functools.partial(jax.jit, donate_argnums=0)
    def add(self, other: "GradientAccumulator") -> "GradientAccumulator":
        """Return the sums over the microbatches of both. This accumulator is donated."""
        return jax.tree.map(jnp.add, self, other)

    def mean(self) -> tuple[PartialMetrics, PyTree]:
        """Return the metrics and gradients of the step, equal to those of a whole batch."""
        divisor = loss_divisor(self.weight)
        # Gradients were divided by the number of microbatches, as if all had the same weight.
        gradients = jax.tree.map(
            lambda g: g * (self.count / divisor).astype(g.real.dtype), self.gradients
        )
        reported: ReportedMetrics = jax.tree.map(lambda x: x / self.count, self.reported)
        if self.of_loss:
            of_loss = {name: x / divisor for name, x in self.of_loss.items()}
            reported["metrics"] = {**reported.get("metrics", {}), **of_loss}
        return {"loss": self.loss / divisor, "weight": self.weight, **reported}, gradients


def compile_forward(
    pipeline: Pipeline, num_microbatches: int
) -> Callable[..., tuple[PyTree, GradientAccumulator, jax.Array]]:
    """Return the jitted `forward(state, batch, index)` of a pipeline with one microbatch."""
    if num_microbatches > 1:
        _check_aux_losses(pipeline, num_microbatches)

    def jaxpipe_forward_backward(
        state: TrainState, batch: Batch, index: jax.Array
    ) -> tuple[PyTree, GradientAccumulator, jax.Array]:
        # Layers see the cotangent of the mean over the step's microbatches, as in a whole batch. If
        # losses are `(sum, weight)`, later microbatches are assumed to have the weight of the
        # current one. This only makes a difference in a layer whose backward is not linear.
        metrics, gradients, collections = pipeline.programs.partial_gradients(
            state, batch, index, np.int32(num_microbatches)
        )
        total = GradientAccumulator.of_microbatch(
            metrics, gradients, pipeline.programs.objective.metric_names
        )
        return collections, total, metrics["loss"]

    return jax.jit(jaxpipe_forward_backward)


def compile_update(
    pipeline: Pipeline,
) -> Callable[[TrainState, PyTree, GradientAccumulator], tuple[TrainState, Metrics]]:
    """Return the jitted `update(state, collections, accumulator)`, which donates the state."""

    def jaxpipe_update(
        state: TrainState, collections: PyTree, total: GradientAccumulator
    ) -> tuple[TrainState, Metrics]:
        new = state.collections
        metrics, gradients = total.mean()
        # Any pipeline whose state has the same structure will do.
        state, more = pipeline.update(state, gradients)
        # If gradients overflow, the collections before the step are restored.
        return dataclasses.replace(state, collections=collections_after(more, collections, new)), {
            **metrics,
            **more,
        }

    # The same sharding as before, because the next program is compiled for it.
    of_state = jax.tree.map(lambda x: x.sharding, pipeline.states.struct)
    return jax.jit(jaxpipe_update, donate_argnums=0, out_shardings=(of_state, None))


def _check_aux_losses(pipeline: Pipeline, num_microbatches: int) -> None:
    module = pipeline.module
    trace = pipeline.trace
    names = [
        f"{named.name}/{name}"
        for named in module.layers
        for name in trace.aux[named.index].get("losses", ())
    ]
    if (
        names
        and jax.eval_shape(
            module.loss_terms, trace.boundaries[-1], pipeline.batches.microbatch.labels
        )[1]
        is not None
    ):
        raise PipelineError(
            "a loss_fn that returns (sum, weight) must be alone in a step of several forward "
            f"calls, but got gradient_accumulation_steps={num_microbatches} and the layers' loss "
            f"{names[0]!r}, which weighs all microbatches equally. Call train_batch(data_iter), or "
            "let loss_fn return a mean."
        )
