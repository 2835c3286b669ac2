"""From sums over microbatches to the loss: what counts, and what it is divided by."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _numbers import Scale, on_stages

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.core.executor._loss import Objective, gather_values, loss_divisor
from jaxpipe.errors import LayerError

STAGES, REPLICAS, MICROBATCHES = 2, 2, 3
STRUCT = jax.ShapeDtypeStruct((2,), jnp.float32)


def mean(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return (outputs * labels).mean()


def weighted(
    outputs: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Metrics are not in the order of their names."""
    return (outputs * labels).sum(), labels.sum(), {"b": outputs[0], "a": outputs[1]}


def objective(loss_fn: Callable[..., Any]) -> Objective:
    module = PipelineModule([LayerSpec(Scale)], num_stages=1, loss_fn=loss_fn)
    return Objective(module, STRUCT, STRUCT, MICROBATCHES * REPLICAS)


def test_a_loss_of_a_value_on_a_python_object_is_refused() -> None:
    held: list[jax.Array] = []
    jax.make_jaxpr(lambda x: held.append(x * 2))(jnp.ones(2))
    with pytest.raises(LayerError, match=r"loss_fn must compute from .* got float32\[2\] that an"):
        objective(lambda outputs, labels: mean(outputs, labels) + held[0].sum())


def divisors(loss_fn: Callable[..., Any], labels: list[jax.Array]) -> list[float]:
    """On each device the divisor, from the labels of each, `[microbatch, sample]`."""

    def device(labels: jax.Array) -> jax.Array:
        return objective(loss_fn).divisor(lambda m: labels[m], MICROBATCHES)

    return [float(each) for each in on_stages(device, labels, replicas=REPLICAS)]


def test_a_mean_counts_microbatches_and_replicas() -> None:
    labels = [jnp.ones((MICROBATCHES, 2))] * STAGES * REPLICAS
    assert divisors(mean, labels) == [MICROBATCHES * REPLICAS] * STAGES * REPLICAS


def test_weights_are_summed_over_microbatches_and_replicas_but_no_stages() -> None:
    """All stages of a replica have its labels."""
    one, other = jnp.arange(1.0, 7.0).reshape(MICROBATCHES, 2), jnp.full((MICROBATCHES, 2), 100.0)
    assert divisors(weighted, [one, other, one, other]) == [21 + 600] * STAGES * REPLICAS


def test_what_a_microbatch_gives() -> None:
    outputs, labels = jnp.asarray([3.0, 5.0]), jnp.asarray([7.0, 11.0])
    sums, weight = objective(mean).measure(outputs, labels)
    assert (sums.tolist(), float(weight)) == ([38], 1)
    sums, weight = objective(weighted).measure(outputs, labels)
    assert (sums.tolist(), float(weight)) == ([76, 5 * 18, 3 * 18], 18)


def test_metrics_have_the_names_of_their_sums() -> None:
    found = objective(weighted)
    assert found.metric_names == ("a", "b")
    loss, metrics = found.named(jnp.asarray([2.0, 3.0, 5.0]))
    assert (float(loss), {name: float(x) for name, x in metrics.items()}) == (2, {"a": 3, "b": 5})
    assert objective(mean).named(jnp.asarray([2.0]))[1] == {}


@pytest.mark.parametrize(("weight", "divisor"), [(0.0, 1.0), (0.5, 0.5), (3.0, 3.0)])
def test_where_nothing_weighs_the_loss_is_no_nan(weight: float, divisor: float) -> None:
    assert float(loss_divisor(jnp.float32(weight))) == divisor


def test_reports_are_means_over_microbatches_and_replicas_by_stage() -> None:
    """Each stage has layers of its own, in padded slots; those without a name do not count."""
    names = [
        [("losses", "a"), ("", ""), ("metrics", "b")],
        [("metrics", "c"), ("losses", "d"), ("", "")],
    ]
    # Stage 0 of both replicas, then stage 1.
    values = [[1, 9, 2], [10, 9, 20], [3, 4, 9], [30, 40, 9]]

    def device(mine: jax.Array) -> Any:
        return gather_values(mine, names, 2)

    given = [jnp.asarray(each, jnp.float32) for each in values]
    wanted = {"losses": {"a": 11 / 2, "d": 44 / 2}, "metrics": {"b": 22 / 2, "c": 33 / 2}}
    for found in on_stages(device, given, replicas=REPLICAS):
        assert jax.tree.map(float, found) == wanted


def test_models_that_report_nothing_have_no_reports() -> None:
    assert gather_values(jnp.zeros((0,)), [[], []], 2) == {"losses": {}, "metrics": {}}
