"""The claim `layers`: what it refuses of users' functions, what it accepts, and what it says."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _faults import squares

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.tools.prove._layers import Fault, layer_findings
from jaxpipe.tools.prove._prove import made_job

DIM = 8


def numbers() -> tuple[np.ndarray, np.ndarray]:
    x, t = np.random.default_rng(0).standard_normal((2, 16, DIM)).astype(np.float32)
    return x, t


def tokens() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, 32, (16, 6)).astype(np.int32)
    return x, np.ones((16, 6, DIM), np.float32)


def found(
    layers: list[Any],
    example: Any = None,
    loss_fn: Any = squares,
    samples: int = 4,
) -> tuple[list[Fault], dict[str, str]]:
    """The faults of a model, and the figures."""
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = PipelineModule(layers, 1, loss_fn=loss_fn)
    with jax.numpy_rank_promotion("allow"):  # as for users
        job = made_job(model, config, numbers() if example is None else example).job
        yielded = list(layer_findings(job, job.finest))
    faults = [each for each in yielded if isinstance(each, Fault)]
    figures = [each for each in yielded if not isinstance(each, Fault)]
    return faults, {name: text for each in figures for name, text in each.items()}


def narrow(mix: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def layer(x: jax.Array) -> jax.Array:
        return mix(x.astype(jnp.bfloat16)).astype(x.dtype)

    return layer


def less_mean(x: jax.Array) -> jax.Array:
    return x - x.mean(0)


def not_a_number(x: jax.Array) -> jax.Array:
    """The second sample reaches the others as NaN, and nothing else is finite."""
    return jnp.where(x[1:2] > 0, jnp.nan, jnp.inf) + 0 * x


def from_the_last(x: jax.Array) -> jax.Array:
    return x.at[1].add(0.1 * x[-1])


class Centred(nn.Module):
    """Embeds tokens, and subtracts the mean over the samples."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return less_mean(nn.Embed(32, DIM)(tokens))


DENSE = LayerSpec(nn.Dense, DIM)
MIXING: dict[str, Any] = {
    "an earlier sample": lambda x: jnp.cumsum(x, 0),
    "another order": lambda x: jnp.flip(x, 0),
    "one sample of the middle": from_the_last,
    "the largest": lambda x: x / jnp.abs(x).max(),
    "the mean, in bfloat16": narrow(less_mean),
    "a little of the mean, in bfloat16": narrow(lambda x: x - 0.1 * x.mean(0)),
    "the mean, given in bfloat16": lambda x: less_mean(x.astype(jnp.bfloat16)),
    "integers": lambda x: jnp.argsort(jnp.argsort(x, 0), 0),
    "not finite": not_a_number,
    "beside the samples": lambda x: (x, x.mean(0)),
}


@pytest.mark.parametrize("name", sweep(3, [*MIXING], rest=pytest.mark.slow))
def test_a_layer_that_mixes_samples_is_refused(name: str) -> None:
    last = (lambda x: x[0]) if name == "beside the samples" else lambda x: x.astype(float)
    (fault,), _ = found([DENSE, MIXING[name], last, DENSE])
    assert fault.where.startswith("layer 1")
    assert "other samples" in fault.what


def test_a_first_layer_of_integers_that_mixes_samples_is_refused() -> None:
    (fault,), _ = found([LayerSpec(Centred), DENSE], tokens())
    assert "Centred" in fault.where


def test_samples_that_are_all_equal_are_named() -> None:
    example = np.zeros((8, 6), np.int32), np.ones((8, 6, DIM), np.float32)
    faults, figures = found([LayerSpec(nn.Embed, 32, DIM), DENSE], example)
    assert faults == []
    assert list(figures) == ["mixing of samples not checked"]


def test_each_layer_that_mixes_samples_is_named() -> None:
    mean = lambda x: x - 0.5 * x.mean(0)  # noqa: E731
    faults, _ = found([DENSE, less_mean, DENSE, mean, DENSE])
    assert [fault.where.partition("_")[0] for fault in faults] == ["layer 1", "layer 3"]


TABLE = np.random.default_rng(1).standard_normal((6, DIM)).astype(np.float32)
ALONE: dict[str, list[Any]] = {
    "a table beside the samples": [
        lambda x: (x, jnp.asarray(TABLE, x.dtype)),
        lambda pair: pair[0] + pair[1].sum(0),
    ],
    "a table with a row for each sample": [
        lambda x: (x, jnp.asarray(TABLE[:4], x.dtype)),
        lambda pair: pair[0] + pair[1].sum(0),
    ],
    "samples along the second dim": [
        lambda x: jnp.swapaxes(x.reshape(-1, 4, 2), 0, 1),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, DIM),
    ],
    "samples and positions in one dim": [
        lambda x: x.reshape(-1, 2),
        lambda x: jnp.tanh(x),
        lambda x: x.reshape(-1, DIM),
    ],
    "a loss handed on": [
        lambda x: (x, jnp.mean(x**2)),
        lambda pair: (jnp.tanh(pair[0]), pair[1] + jnp.mean(pair[0])),
        lambda pair: pair[0],
    ],
    "not finite, sample by sample": [
        lambda x: jnp.where(x > 0, jnp.inf, jnp.log(x)),
        lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    ],
    "bfloat16": [narrow(lambda x: x - x.mean(1, keepdims=True))],
}


@pytest.mark.parametrize("name", sweep(2, [*ALONE], rest=pytest.mark.slow))
def test_layers_that_compute_each_sample_alone_hold(name: str) -> None:
    assert found([DENSE, *ALONE[name], DENSE])[0] == []


@pytest.mark.soak
def test_layers_that_cannot_compute_in_float64_are_checked_in_their_own_dtypes() -> None:
    cell = nn.RNN(nn.GRUCell(DIM))  # its carry is in float32
    example = np.ones((8, 3, DIM), np.float32), np.ones((8, 3, DIM), np.float32)
    assert found([cell, DENSE], example) == ([], {})
    assert len(found([cell, less_mean, DENSE], example)[0]) == 1


def test_a_layer_that_draws_booleans_when_it_is_traced_is_named() -> None:
    rng = np.random.default_rng(0)
    faults, _ = found([DENSE, lambda x: jnp.where(rng.random(DIM) > 0.5, x, 0), DENSE])
    assert [fault.what for fault in faults] == ["computes something else when it is traced again"]


def squared(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.sum((y - t) ** 2)


def in_bfloat16(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square((2.3 * y - t).astype(jnp.bfloat16)))


def guarded(y: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Only some samples count, and none of the second half."""
    mask = (t[:, 0] > 100).astype(y.dtype)
    return jnp.sum(mask * (y - t)[:, 0] ** 2), jnp.maximum(mask.sum(), 1)


def contrast(y: jax.Array, t: jax.Array) -> tuple[jax.Array, int]:
    return -jnp.trace(jax.nn.log_softmax(y @ t.T.astype(y.dtype))), len(y)


SUMS: dict[str, tuple[Any, int]] = {
    "a mean given as a sum": (lambda y, t: (squares(y, t), jnp.float32(t.size)), 4),
    "a sum of samples with the weight of one": (lambda y, t: (squared(y, t), 1), 4),
    "a sum, odd samples": (squared, 3),
    "a sum in bfloat16": (lambda y, t: DIM * 4 * in_bfloat16(y, t) * len(y), 4),
    "a weighted loss over pairs of samples": (contrast, 4),
    "NaN for all samples": (
        lambda y, t: squares(y, t) * (jnp.nan if len(y) > 2 else 1.0),
        4,
    ),
}


@pytest.mark.parametrize("name", sweep(2, [*SUMS], rest=pytest.mark.slow))
def test_a_loss_that_does_not_add_up_is_refused(name: str) -> None:
    loss_fn, samples = SUMS[name]
    (fault,), _ = found([DENSE, DENSE], None, loss_fn, samples)
    assert fault.where == "loss_fn"


MEANS: dict[str, tuple[Any, int]] = {
    "odd samples": (squares, 3),
    "in bfloat16": (in_bfloat16, 4),
    "terms of both signs": (lambda y, t: jnp.mean((y * t).astype(jnp.float32)), 4),
    "terms of both signs, in bfloat16": (
        lambda y, t: jnp.mean(y.astype(jnp.bfloat16) * t.astype(jnp.bfloat16)),
        4,
    ),
    "weighted": (lambda y, t: (squared(y, t), t.size), 3),
    "a weight that is never 0": (guarded, 4),
    "weighted, in bfloat16": (
        lambda y, t: (in_bfloat16(y, t) * t.size, jnp.sum(jnp.ones_like(t, jnp.bfloat16))),
        4,
    ),
}


def masked(outputs: Any, t: jax.Array) -> jax.Array:
    """Outputs are the samples, a mask that is 1 everywhere, and a table."""
    y, mask, table = outputs
    return jnp.mean((y - t) ** 2 * mask) + jnp.mean(table**2)


def test_outputs_that_do_not_change_with_the_samples_are_cut_by_their_first_dim() -> None:
    last = lambda x: (x, jnp.ones_like(x), jnp.asarray(TABLE, x.dtype))  # noqa: E731
    assert found([DENSE, last], None, masked) == ([], {})


@pytest.mark.parametrize("name", sweep(2, [*MEANS], rest=pytest.mark.slow))
def test_a_loss_that_adds_up_holds(name: str) -> None:
    loss_fn, samples = MEANS[name]
    assert found([DENSE, DENSE], None, loss_fn, samples) == ([], {})


UNCUT: dict[str, tuple[list[Any], Any, int]] = {
    "one sample": ([DENSE], squared, 1),
    "a fixed number of samples": (
        [DENSE],
        lambda y, t: squares(y.reshape(4, 2, 4), t.reshape(4, 2, 4)),
        4,
    ),
    "samples and positions in one dim": (
        [lambda x: x.reshape(-1, 2)],
        lambda y, t: squares(y, t.reshape(-1, 2)),
        4,
    ),
    "the last layer": ([lambda x: jnp.mean(x**2)], None, 4),
}


@pytest.mark.parametrize("name", UNCUT)
def test_a_loss_that_cannot_be_cut_is_not_refused_in_silence(name: str) -> None:
    layers, loss_fn, samples = UNCUT[name]
    faults, figures = found([DENSE, *layers], None, loss_fn, samples)
    assert faults == []
    assert "loss not cut" in figures
