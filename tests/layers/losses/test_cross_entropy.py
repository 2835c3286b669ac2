"""Losses of language models, from whole logits and from slices of them, against optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import ROWS
from _on_stages import on_two_stages
from _refusals import assert_refused
from _tolerances import GRADIENT

from jaxpipe.errors import LayerError
from jaxpipe.losses import SplitLogits, cross_entropy, vocab_cross_entropy

SHAPE = (2, 5)
WEIGHTS = np.asarray([[1, 0.5, 0, 2, 1], [0, 0, 1, 1, 3]], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": WEIGHTS},
    "mask": {"weights": WEIGHTS > 0},
    "ignored": {"ignore_index": 3},
    "smoothed": {"label_smoothing": 0.1},
    "uniform": {"label_smoothing": 1.0},
    "z": {"z_loss": 1e-2},
    "all": {"weights": WEIGHTS, "ignore_index": 5, "label_smoothing": 0.2, "z_loss": 1e-3},
}


def inputs(dtype: Any = np.float32, seed: int = 0) -> tuple[jax.Array, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.normal(size=(*SHAPE, ROWS)), dtype)
    labels = rng.integers(0, ROWS, SHAPE, np.int32)
    labels[0, :3] = 3, 5, 3
    return logits, labels


def oracle(
    logits: jax.Array,
    labels: Any,
    weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, Any]:
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    targets = optax.smooth_labels(jax.nn.one_hot(labels, ROWS, dtype=logits.dtype), label_smoothing)
    each = optax.softmax_cross_entropy(logits, targets) + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    factors = (labels != ignore_index) * (
        np.ones(SHAPE, np.float32) if weights is None else np.float32(weights)
    )
    return (each * factors).sum(), factors.sum()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", sweep(1, [jnp.float32, jnp.bfloat16], rest=pytest.mark.slow))
def test_values_and_gradients_are_those_of_optax(name: str, dtype: Any) -> None:
    (logits, labels), options = inputs(dtype), OPTIONS[name]
    (found, weight), gradient = jax.value_and_grad(cross_entropy, has_aux=True)(
        logits, labels, **options
    )
    (wanted, count), wanted_gradient = jax.value_and_grad(oracle, has_aux=True)(
        logits, labels, **options
    )
    assert float(weight) == pytest.approx(float(count))
    np.testing.assert_allclose(found, wanted, rtol=GRADIENT)
    tolerance = GRADIENT if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
        *(np.float32(x) for x in (gradient, wanted_gradient)), rtol=tolerance, atol=1e-6
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_slices_give_what_whole_logits_give(name: str) -> None:
    (logits, labels), options = inputs(seed=1), OPTIONS[name]

    def split(local: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(SplitLogits(local, ROWS), labels, **options)[0]

    found = on_two_stages(split, 2)(logits, labels)
    wanted = jax.jit(jax.value_and_grad(lambda y, t: cross_entropy(y, t, **options)[0]))(
        logits, labels
    )
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=GRADIENT, atol=1e-7)


@pytest.mark.parametrize("outside", [-1, ROWS, 7 * ROWS, -100, 2**31 - 1])
def test_a_label_outside_the_vocabulary_is_nan_unless_it_is_ignored(outside: int) -> None:
    logits, labels = inputs()
    labels[1, 1] = outside

    def split(local: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(SplitLogits(local, ROWS), labels)[0]

    for value in (cross_entropy(logits, labels)[0], on_two_stages(split, 2)(logits, labels)[0]):
        assert np.isnan(float(value)) == (outside != -100)
    # Nor does one of weight 0 count, whatever it is.
    masked, gradient = jax.value_and_grad(lambda y: cross_entropy(y, labels, labels != outside)[0])(
        logits
    )
    assert np.isfinite(float(masked))
    assert np.isfinite(np.asarray(gradient)).all()
    assert not np.asarray(gradient)[1, 1].any()


def test_where_nothing_counts_sum_and_weight_are_0() -> None:
    logits, labels = inputs()
    value, weight = cross_entropy(logits.at[0, 0, 0].set(jnp.inf), np.full_like(labels, -100))
    assert (float(value), float(weight)) == (0, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64, np.uint32])
def test_labels_of_any_integer_dtype(dtype: Any) -> None:
    logits, labels = inputs()
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(
            cross_entropy(logits, labels.astype(dtype)), cross_entropy(logits, labels)
        )


def test_large_logits_do_not_overflow() -> None:
    logits, labels = inputs()
    value, _ = cross_entropy(1e4 * logits, labels)
    assert np.isfinite(float(value))


@pytest.mark.slow
def test_split_logits_are_indexed_and_reshaped_along_leading_dims() -> None:
    logits, labels = inputs()

    def shifted(y: Any, t: Any) -> jax.Array:
        y = y.astype(jnp.float32)[:, :-1].reshape(-1, ROWS)
        return cross_entropy(y, t[:, 1:].reshape(-1))[0]

    found = on_two_stages(lambda y, t: shifted(SplitLogits(y, ROWS), t), 2)(logits, labels)
    for x, y in zip(found, jax.value_and_grad(shifted)(logits, labels), strict=True):
        np.testing.assert_allclose(x, y, rtol=GRADIENT, atol=1e-7)
    split = SplitLogits(logits[..., : ROWS // 2], ROWS)
    assert (split.shape, split.ndim, split.dtype) == ((*SHAPE, ROWS), 3, jnp.float32)
    assert repr(split) == f"SplitLogits(float32[2, 5, {ROWS}])"
    assert split[0].shape == (5, ROWS)
    assert split.reshape((10, ROWS)).shape == (10, ROWS)
    for index in ((0, 0, 0), (..., 0), (None, 0), (slice(None), slice(None), slice(0, 4))):
        words = "must leave out their last dim, which is split over the stages, but got"
        assert_refused(LayerError, words, split.__getitem__, index)
    for shape in ((-1,), (ROWS, -1), (-1, ROWS // 2)):
        words = "must keep their last dim, 16, but got ... logits.reshape(-1, 16)"
        assert_refused(LayerError, words, split.reshape, *shape)
    with pytest.raises(TypeError):
        iter(split)
    with pytest.raises(TypeError):
        jnp.mean(split)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("labels_of", [lambda t: t, lambda t: t.astype(np.uint8)])
def test_each_position_is_that_of_optax(labels_of: Any) -> None:
    logits, labels = inputs()
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(vocab_cross_entropy(logits, labels_of(labels)), wanted, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    given = dict(zip(("logits", "labels"), inputs(), strict=True))

    def refused(words: str, **changes: Any) -> None:
        assert_refused(LayerError, words, cross_entropy, **{**given, **changes})

    words = "logits must be an array ... got np.float32(1.0). Pass the model's output"
    refused(words, logits=np.float32(1))
    words = "labels must be integers, ... but got float32. Pass jnp.argmax"
    refused(words, labels=np.zeros(SHAPE, np.float32))
    words = "without their last dim, [2, 5], but got [2, 4]. Shift labels"
    refused(words, labels=np.zeros((2, 4), int))
    refused("[2, 5], but got [5]. Broadcast them", weights=np.ones(5))
    for value in (1.5, float("nan")):
        words = f"must be in [0, 1], but got label_smoothing={value}"
        refused(words, label_smoothing=value)
    refused("z_loss must be at least 0, but got z_loss=-1.0", z_loss=-1.0)
