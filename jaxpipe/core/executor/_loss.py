"""The loss of a batch from its sums over microbatches, and the divisor of the sums."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed.topology import axes_length, sum_over
from jaxpipe.errors import LayerError
from jaxpipe.layers import PipelineModule, check_held
from jaxpipe.layers.losses import over_samples
from jaxpipe.programs.jaxpr import output_dependence

from ._metrics import EvaluationMetrics


class SampleTerms(NamedTuple):
    """Contributions of an evaluation's microbatches to the sums over a whole set of samples.

    A sum has `1 + metrics` numbers: the loss times its weight, then each metric times its weight,
    in the order of the metrics' names. If the loss is a mean, each sample has weight 1.

    Attributes:
        sums: Sums of each microbatch of each replica, `[num_microbatches, replicas, 1 + metrics]`.
        weights: Weights of these microbatches, `[num_microbatches, replicas]`.
        sample_sums: Sums of each single sample, `[num_microbatches, samples, 1 + metrics]`. None if
            the loss does not accept a single sample.
        sample_weights: Weights of these samples, `[num_microbatches, samples]`.
    """

    sums: jax.Array
    weights: jax.Array
    sample_sums: jax.Array | None
    sample_weights: jax.Array | None


class Objective:
    """Loss of a batch: the mean over microbatches and replicas, or a weighted mean.

    A weighted mean is the sum of the losses divided by the sum of their weights. `num_terms` is the
    number of microbatches times replicas.
    """

    def __init__(
        self, module: PipelineModule, outputs: PyTree, labels: PyTree, num_terms: int
    ) -> None:
        self._module = module
        self._outputs = outputs
        self.num_terms = num_terms
        closed, terms = jax.make_jaxpr(module.loss_terms, return_shape=True)(outputs, labels)
        check_held("loss_fn", closed)
        self.is_weighted = terms.weight is not None
        # In the order of the values that `measure` returns after the loss.
        self.metric_names = tuple(sorted(terms.metrics))
        if self.is_weighted:
            # The divisor is needed before the first loss, so weights are computed in advance, from
            # the labels only.
            num_outputs = len(jax.tree.leaves(outputs))
            bits = [int(i < num_outputs) for i in range(len(closed.jaxpr.invars))]
            found = output_dependence(closed.jaxpr, bits)
            if jax.tree.unflatten(jax.tree.structure(terms), found).weight:
                raise LayerError(
                    "the weight that loss_fn returns must depend on the labels alone, but got one "
                    "computed from the model's output. Compute it from the labels, such as "
                    "jnp.sum(labels != padding); to report a metric, return (sum, weight, {name: "
                    "metric})."
                )

    def divisor(self, labels: Callable[[jax.Array], PyTree], num_microbatches: int) -> jax.Array:
        """Compute the divisor of the sum of all losses, `float32[]`. Must be in `shard_map`."""
        if not self.is_weighted:
            return jnp.float32(self.num_terms)
        # The outputs are replaced by zeros: the weight does not depend on them, so XLA removes all
        # computations that use them.
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._outputs)
        weights = jax.lax.map(
            lambda m: self.measure(nothing, labels(m))[1], jnp.arange(num_microbatches)
        )
        # Not summed over the stages: each stage has all labels of its replica.
        return sum_over(jnp.sum(weights), "data")

    def measure(self, outputs: PyTree, labels: PyTree) -> tuple[jax.Array, jax.Array]:
        """Compute `(LossTerms.sums, weight)` of one microbatch; the weight of a mean is 1."""
        terms = self._module.loss_terms(outputs, labels)
        return terms.sums(), jnp.float32(1) if terms.weight is None else terms.weight

    def measure_replica(self, outputs: PyTree, labels: PyTree) -> tuple[jax.Array, jax.Array]:
        """Compute `measure` as arrays with one entry for each replica."""
        return jax.tree.map(lambda x: x[None], self.measure(outputs, labels))

    def means(self, terms: tuple[jax.Array, jax.Array]) -> EvaluationMetrics:
        """Compute the losses of a batch and its microbatches from all of `measure_replica`."""
        sums, weights = (jnp.sum(x, axis=1) for x in terms)
        loss, of_loss = self.named(jnp.sum(sums, axis=0) / loss_divisor(jnp.sum(weights)))
        metrics: EvaluationMetrics = {
            "loss": loss,
            "microbatch_losses": sums[:, 0] / loss_divisor(weights),
        }
        if of_loss:
            metrics["metrics"] = of_loss
        return metrics

    def measure_samples(self, outputs: PyTree, labels: PyTree) -> SampleTerms:
        """Compute the sums and weights of one microbatch and of each of its samples."""
        sums, weight = self.measure(outputs, labels)
        leaf = (jax.tree.leaves(labels) or jax.tree.leaves(outputs))[0]
        num_samples = leaf.shape[0] if leaf.ndim else 1
        if not self.is_weighted:
            sums = num_samples * sums
            weight = jnp.float32(num_samples)
        try:
            of_samples = over_samples(self.measure, outputs, labels)
        # The user's function may raise anything, for example if the loss compares pairs of samples
        # or the outputs have no samples.
        except Exception:  # noqa: BLE001
            of_samples = None, None
        return SampleTerms(sums[None], weight[None], *of_samples)

    def named(self, values: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Name the loss and the metrics in means of the values that `measure` returns."""
        return values[0], dict(zip(self.metric_names, values[1:], strict=True))


def loss_divisor(weight: jax.Array) -> jax.Array:
    """Return the divisor for a weight: 1 if the weight is 0, so that the loss is 0, not NaN."""
    return jnp.where(weight == 0, 1.0, weight)


def gather_values(
    values: jax.Array, names: Sequence[Sequence[tuple[str, str]]], divisor: Any
) -> dict[str, dict[str, jax.Array]]:
    """Return `{"losses": {name: mean}, "metrics": {name: mean}}` of all stages, on every device."""
    # `values` are this stage's sums over microbatches, `float32[n]`. `names` has the kind and name
    # of each value of each stage, empty for padding. `divisor` is the number of microbatches times
    # replicas.
    found: dict[str, dict[str, jax.Array]] = {"losses": {}, "metrics": {}}
    if values.shape[0] == 0:
        return found
    # Gathered over the stages, which have different layers, and summed over the replicas, which
    # have the same layers.
    everywhere = sum_over(_gather(values), "data") / divisor
    for stage, slots in enumerate(names):
        for i, (kind, name) in enumerate(slots):
            if kind:
                found[kind][name] = everywhere[stage, i]
    return found


def _gather(values: jax.Array) -> jax.Array:
    return jax.lax.all_gather(values, "stage") if axes_length("stage") > 1 else values[None]
