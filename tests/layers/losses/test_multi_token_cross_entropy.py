"""The loss of several tokens at each position, against sums over positions one by one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _models import ROWS
from _on_stages import on_two_stages
from _refusals import assert_refused
from _tolerances import GRADIENT

from jaxpipe.errors import LayerError
from jaxpipe.losses import SplitLogits, cross_entropy, multi_token_cross_entropy

SAMPLES, DEPTHS, LENGTH = 2, 3, 5
WEIGHTS = np.asarray([[1, 0.5, 2, 0, 3], [1, 1, 0.5, 1, 2]], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": WEIGHTS, "extra_weight": 0.1},
    "ignored": {"ignore_index": 3},
    "all": {"weights": WEIGHTS, "ignore_index": 3, "label_smoothing": 0.2, "z_loss": 1e-3},
}


def inputs() -> tuple[jax.Array, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.normal(size=(SAMPLES, DEPTHS, LENGTH, ROWS)), jnp.float32)
    labels = rng.integers(4, ROWS, (SAMPLES, LENGTH), np.int32)
    labels[0, 2] = labels[1, 3] = 3
    return logits, labels


def one_by_one(
    logits: jax.Array,
    labels: np.ndarray,
    weights: Any = None,
    extra_weight: float = 0.3,
    ignore_index: int = -100,
    **options: Any,
) -> jax.Array:
    factors = np.ones(labels.shape) if weights is None else weights
    factors = np.where(labels == ignore_index, 0, factors)
    total = jnp.zeros(())
    for sample in range(SAMPLES):
        for depth in range(DEPTHS):
            share = extra_weight / (DEPTHS - 1) if depth else 1.0
            for place in range(LENGTH - depth):
                ahead = place + depth
                if (factors[sample, place : ahead + 1] == 0).any():
                    continue
                at = logits[sample, depth, place]
                each, _ = cross_entropy(at, labels[sample, ahead], **options)
                total += share * factors[sample, ahead] * each
    return total


@pytest.mark.parametrize("name", sweep(1, list(reversed(OPTIONS))))
def test_values_and_gradients_are_those_of_single_positions(name: str) -> None:
    (logits, labels), options = inputs(), OPTIONS[name]

    def total(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return multi_token_cross_entropy(logits, labels, **options)[0]

    def split(local: jax.Array, labels: jax.Array) -> jax.Array:
        return total(SplitLogits(local, ROWS), labels)

    wanted = jax.jit(jax.value_and_grad(lambda y: one_by_one(y, labels, **options)))(logits)
    whole = jax.jit(jax.value_and_grad(total))
    for found in (whole(logits, labels), on_two_stages(split, 3)(logits, labels)):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=GRADIENT, atol=1e-6)


def test_the_weight_and_the_metrics_are_those_of_the_next_token() -> None:
    logits, labels = inputs()
    total, weight, metrics = multi_token_cross_entropy(logits, labels, extra_weight=0.5)
    alone, count = cross_entropy(logits[:, 0], labels)
    assert float(weight) == float(count)
    np.testing.assert_allclose(metrics["next_token_loss"], alone / count, rtol=1e-6)
    both = metrics["next_token_loss"] + 0.5 * metrics["multi_token_loss"]
    np.testing.assert_allclose(both, total / weight, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    logits, labels = inputs()
    refused, loss = partial(assert_refused, LayerError), multi_token_cross_entropy
    for one in (logits[:, 0], logits[:, :1]):
        refused("but got shape [2, ... multi_token=True", loss, one, labels)
    words = "at least 0, but got extra_weight=-1. Use for"
    refused(words, loss, logits, labels, extra_weight=-1)
    refused("[2, 5], but got [2, 4]", loss, logits, labels[:, 1:])
    words = "got logits of 3 tokens at each position: [2, 3, 5, ... Use multi_token_cross_entropy"
    refused(words, cross_entropy, logits, labels)
