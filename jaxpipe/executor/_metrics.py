"""Metrics of a step, by name.

Dictionaries of arrays on the devices, some of whose keys depend on the model.
"""

from typing import NotRequired, TypedDict

import jax


class ReportedMetrics(TypedDict, total=False):
    """Values that layers report, means over microbatches and replicas.

    A kind that none reports is not there.

    Attributes:
        losses: The losses that layers add to the main one, by `layer/name`.
        metrics: The other values, by `layer/name`, and those that `loss_fn` returns by their names,
            means weighted as the loss is.
    """

    losses: dict[str, jax.Array]
    metrics: dict[str, jax.Array]


class PartialMetrics(ReportedMetrics):
    """Metrics of a batch, or a part of one, that was differentiated.

    Attributes:
        loss: The loss of the batch, what layers add to it included.
        weight: What the losses of the batch were divided by: their number, or the sum of weights.
    """

    loss: jax.Array
    weight: jax.Array


class GradientMetrics(PartialMetrics):
    """Metrics of a whole batch that was differentiated.

    Attributes:
        grad_norm: Global norm of the gradient before clipping.
        grad_norms: That of each layer, by its name; where `gradient_norms_by_layer` asks for them.
    """

    grad_norm: jax.Array
    grad_norms: NotRequired[dict[str, jax.Array]]


class UpdateMetrics(TypedDict):
    """Metrics of an update.

    Attributes:
        grad_norm: Global norm of the gradient before clipping.
        grad_norms: That of each layer, by its name; where `gradient_norms_by_layer` asks for them.
        loss_scale: The loss scale of the step, if there is one.
        overflow: True if gradients overflowed and the update was skipped; where there is a loss
            scale.
    """

    grad_norm: jax.Array
    grad_norms: NotRequired[dict[str, jax.Array]]
    loss_scale: NotRequired[jax.Array]
    overflow: NotRequired[jax.Array]


class Metrics(GradientMetrics, UpdateMetrics):
    """Metrics of a training step: those of its gradients, and those of its update."""


class EvaluationMetrics(TypedDict):
    """Metrics of an evaluation.

    Attributes:
        loss: The loss of the batch.
        microbatch_losses: That of each microbatch, `[num_microbatches]`.
        metrics: What `loss_fn` returns besides, means over the batch by name; not there if it
            returns none.
    """

    loss: jax.Array
    microbatch_losses: jax.Array
    metrics: NotRequired[dict[str, jax.Array]]
