"""Metrics of a step, by name.

They are dictionaries of arrays on the devices. Some of their keys depend on the model.
"""

from typing import NotRequired, TypedDict

import jax


class ReportedMetrics(TypedDict, total=False):
    """Values that layers report, averaged over microbatches and replicas.

    A key is missing if nothing reports values of its kind.

    Attributes:
        losses: The losses that layers add to the main loss, by `layer/name`.
        metrics: The layers' other values, by `layer/name`, and the metrics that `loss_fn` returns,
            by their names. The latter are averaged with the same weights as the loss.
    """

    losses: dict[str, jax.Array]
    metrics: dict[str, jax.Array]


class PartialMetrics(ReportedMetrics):
    """Metrics of a batch, or of part of a batch, after its gradients.

    Attributes:
        loss: The loss of the batch, including the losses that layers add.
        weight: The divisor of the batch's losses: their number, or the sum of their weights.
    """

    loss: jax.Array
    weight: jax.Array


class GradientMetrics(PartialMetrics):
    """Metrics of a whole batch after its gradients.

    Attributes:
        grad_norm: Global norm of the gradient before clipping.
        grad_norms: Gradient norm of each layer, by the layer's name, if `gradient_norms_by_layer`
            is set.
    """

    grad_norm: jax.Array
    grad_norms: NotRequired[dict[str, jax.Array]]


class UpdateMetrics(TypedDict):
    """Metrics of an update.

    Attributes:
        grad_norm: Global norm of the gradient before clipping.
        grad_norms: Gradient norm of each layer, by the layer's name, if `gradient_norms_by_layer`
            is set.
        loss_scale: The loss scale of the step, if loss scaling is on.
        overflow: True if the norm was not finite, so that the update was not applied. Missing with
            `nonfinite="ignore"`.
    """

    grad_norm: jax.Array
    grad_norms: NotRequired[dict[str, jax.Array]]
    loss_scale: NotRequired[jax.Array]
    overflow: NotRequired[jax.Array]


class Metrics(GradientMetrics, UpdateMetrics):
    """Metrics of a training step: of its gradients and of its update."""


class EvaluationMetrics(TypedDict):
    """Metrics of an evaluation.

    Attributes:
        loss: The loss of the batch.
        microbatch_losses: The loss of each microbatch, `[num_microbatches]`.
        metrics: Means of the metrics that `loss_fn` returns, by name. Missing if it returns none.
    """

    loss: jax.Array
    microbatch_losses: jax.Array
    metrics: NotRequired[dict[str, jax.Array]]
