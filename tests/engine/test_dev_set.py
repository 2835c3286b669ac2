"""`evaluate`: whole sets of samples, against the loss of all of them at once on one device."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import (
    MICROBATCH,
    Reporting,
    apply,
    build,
    build_alone,
    entries,
    entry,
    mean_square,
    module,
    weighted_square,
)
from _tolerances import assert_loss

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule
from jaxpipe.errors import DataError, LayerError, PipelineError
from jaxpipe.losses import cross_entropy, log_probs

VOCAB, LENGTH, DIM = 16, 6, 8


def reporting_loss(outputs: jax.Array, labels: jax.Array) -> Any:
    counts = labels > 0
    errors = jnp.where(counts, abs(outputs - labels), 0.0)
    weight = counts.sum()
    return (errors**2).sum(), weight, {"error": errors.sum() / weight}


def cut(inputs: Any, labels: Any, size: int) -> list[tuple[Any, Any]]:
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, len(inputs), size)]


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("num_samples", sweep(2, [3, 13, 1, 8], rest=pytest.mark.slow))
def test_any_number_of_samples(data: int, num_samples: int) -> None:
    engine = engine_of(data)
    inputs, labels = entry(1, samples=num_samples)
    found = engine.evaluate(cut(inputs, labels, MICROBATCH * data))
    total, weight, metrics = reporting_loss(apply(engine, inputs), labels)
    assert_loss(found["loss"], total / weight if weight else 0.0)
    assert_loss(found["metrics"]["error"], metrics["error"] if weight else 0.0)
    assert found["num_samples"] == num_samples
    assert engine.metrics["evaluation"] == found
    one_by_one = engine.evaluate(cut(inputs, labels, 1))
    assert_loss(one_by_one["loss"], found["loss"])


ENGINES: dict[int, PipelineEngine] = {}


def engine_of(data: int) -> PipelineEngine:
    if data not in ENGINES:
        ENGINES[data] = build(module(data=data, loss_fn=reporting_loss))
    return ENGINES[data]


def test_one_program_and_no_other_state() -> None:
    lines: list[str] = []
    engine = build_alone(example_batch=entry(), reporter=lines.append)
    before = engine.module_state_dict()
    for num_samples in (1, 2, 7, 8):
        engine.evaluate(cut(*entry(0, samples=num_samples), MICROBATCH))
    assert [line for line in lines if line.startswith("compiling")] == [
        "compiling evaluation of samples for 2 microbatches of inputs float32[2, 4], labels "
        "float32[2, 1]"
    ]
    assert sum("evaluation: loss" in line and "8 samples" in line for line in lines) == 1
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), before)
    assert engine.global_steps == 0


def test_a_mean_counts_every_sample_once() -> None:
    engine = build_alone(example_batch=entry())
    inputs, labels = entry(2, samples=5)
    found = engine.evaluate(cut(inputs, labels, 2))
    assert_loss(found["loss"], mean_square(apply(engine, inputs), labels))
    assert "metrics" not in found


@pytest.mark.slow
def test_layers_are_outside_training() -> None:
    layers = [LayerSpec(Reporting), LayerSpec(nn.Dense, 1)]
    engine = build(module(*layers), example_batch=entry())
    engine.train_batch(entries())
    collections = engine.module_collections()
    found = engine.evaluate([entry(3), entry(4, samples=1)])
    inputs, labels = (np.concatenate(x) for x in zip(entry(3), entry(4, samples=1), strict=True))
    outputs, *_ = engine.module.call(engine.module_state_dict(), collections, inputs)
    assert_loss(found["loss"], mean_square(outputs, labels))


@pytest.mark.slow
def test_training_data_stay_where_they_are() -> None:
    engine = build()
    engine.set_dataiterator(entries(count=4))
    first = float(engine.train_batch())
    engine.evaluate(entries(seed=7, count=3))
    engine.train_batch()
    other = build()
    other.set_dataiterator(entries(count=4))
    assert float(other.train_batch()) == first
    other.train_batch()
    jax.tree.map(
        np.testing.assert_array_equal, engine.module_state_dict(), other.module_state_dict()
    )


def pairs_loss(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Compares the two samples of a microbatch."""
    first, second = (outputs - labels).reshape(2, -1)
    return jnp.mean((first - second) ** 2)


def centred_loss(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    error = outputs - labels
    return jnp.mean((error - error.mean()) ** 2)


@pytest.mark.parametrize("loss_fn", [pairs_loss, centred_loss])
def test_losses_that_compare_samples_take_full_entries_alone(loss_fn: Any) -> None:
    engine = build(module(stages=1, loss_fn=loss_fn))
    found = engine.evaluate(entries(count=3))
    wanted = np.mean([loss_fn(apply(engine, x), y) for x, y in entries(count=3)])
    assert_loss(found["loss"], wanted)
    with pytest.raises(PipelineError, match="the mean of its samples' losses"):
        engine.evaluate([entry(), entry(1, samples=1)])


def test_metrics_that_are_no_means_over_samples() -> None:
    def loss_fn(outputs: jax.Array, labels: jax.Array) -> Any:
        squares = (outputs - labels) ** 2
        return squares.sum(), float(squares.size), {"largest": squares.max()}

    engine = build(module(stages=1, loss_fn=loss_fn))
    engine.evaluate(entries(count=3))
    assert_refused(PipelineError, "a metric of", engine.evaluate, [entry(), entry(1, samples=1)])


@pytest.mark.slow
def test_small_losses_that_compare_samples() -> None:
    engine = build(module(stages=1, loss_fn=lambda y, t: 1e-6 * centred_loss(y, t)))
    assert_refused(PipelineError, "a loss of", engine.evaluate, [entry(), entry(1, samples=1)])


def test_without_labels() -> None:
    engine = build(module(stages=1, loss_fn=lambda outputs, _: (outputs**2).mean()))
    inputs, _ = entry(2, samples=5)
    found = engine.evaluate([(inputs[i : i + 2], ()) for i in range(0, 5, 2)])
    assert_loss(found["loss"], (apply(engine, inputs) ** 2).mean())


def test_weights() -> None:
    engine = build(module(stages=1, loss_fn=weighted_square))
    inputs, labels = entry(2, samples=3)
    labels[:2] = 0
    found = engine.evaluate(cut(inputs, labels, 2))
    total, weight = weighted_square(apply(engine, inputs), labels)
    assert_loss(found["loss"], total / weight)
    nothing = engine.evaluate(cut(inputs, 0 * labels, 2))
    assert nothing["loss"] == 0


def test_nan_stays() -> None:
    engine = build_alone(example_batch=entry())
    inputs, labels = entry(2, samples=3)
    labels[2] = np.nan
    assert np.isnan(engine.evaluate(cut(inputs, labels, 2))["loss"])


@pytest.mark.slow
def test_monitors_get_it() -> None:
    seen: list[Any] = []
    engine = build(module(loss_fn=reporting_loss), monitors=[seen.extend])
    engine.train_batch(entries())
    found = engine.evaluate([entry(3)])
    engine.flush_monitors()
    values = {event.name: event.value for event in seen}
    assert values["Evaluation/Samples/loss"] == found["loss"]
    assert values["Evaluation/Samples/error"] == found["metrics"]["error"]


def test_loaders_that_are_none() -> None:
    engine = build_alone(example_batch=entry())
    for words, loader in (
        ("at least one sample", []),
        ("at most 2 in this process", [entry(samples=3)]),
        ("the same number of samples", [(entry()[0], entry(samples=1)[1])]),
        ("must be a tuple", [entry()[0]]),
        ("a loader that ends", jaxpipe.RepeatingLoader([entry()])),
    ):
        assert_refused(DataError, words, engine.evaluate, loader)


def test_an_error_of_the_loader_is_its_own() -> None:
    def broken() -> Iterator[Any]:
        yield entry()
        raise OSError("the disk is gone")

    engine = build_alone(example_batch=entry())
    with pytest.raises(OSError, match="the disk is gone"):
        engine.evaluate(broken())
    assert engine.evaluate([entry()])["num_samples"] == MICROBATCH


def language_model(
    stages: int, data: int, loss_fn: Any = cross_entropy, **settings: Any
) -> PipelineEngine:
    layers = [
        LayerSpec(nn.Embed, VOCAB, DIM),
        *[LayerSpec(nn.Dense, DIM)] * 2,
        LayerSpec(nn.Dense, VOCAB),
    ]
    made = PipelineModule(layers, topology=PipeDataParallelTopology(stages, data), loss_fn=loss_fn)
    return jaxpipe.initialize(
        model=made,
        optimizer=optax.adam(1e-2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            **settings,
        },
        example_batch=texts(2 * data),
    )[0]


def texts(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    tokens = rng.integers(0, VOCAB, (count, LENGTH + 1)).astype(np.int32)
    labels = np.where(rng.random((count, LENGTH)) < 0.3, -100, tokens[:, 1:]).astype(np.int32)
    return tokens[:, :-1], labels


SPLIT = {"pipeline": {"split_vocabulary": True}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "data", "settings"),
    [
        (2, 2, SPLIT),
        pytest.param(2, 1, {}, marks=pytest.mark.soak),
        pytest.param(1, 2, {}, marks=pytest.mark.soak),
        pytest.param(2, 2, {**SPLIT, "zero_optimization": {"stage": 3}}, marks=pytest.mark.soak),
    ],
)
def test_log_probabilities(stages: int, data: int, settings: Any) -> None:
    engine = language_model(stages, data, **settings)
    inputs, labels = texts(7)
    logits = apply(engine, inputs)
    all_of = jax.nn.log_softmax(logits)
    at = np.take_along_axis(np.asarray(all_of), np.maximum(labels, 0)[..., None], -1)[..., 0]
    wanted = np.where(labels == -100, 0.0, at)
    found = engine.log_probs(inputs, labels)
    np.testing.assert_allclose(found, wanted.sum(1), rtol=1e-5)
    np.testing.assert_allclose(log_probs(logits, labels), wanted.sum(1), rtol=1e-5)
    segments = np.array([[0, 0, 1, 1, -1, 2]] * 7, np.int32)
    by_segment = np.stack([(wanted * (segments == i)).sum(1) for i in range(3)], 1)
    found = engine.log_probs(inputs, labels, segment_ids=segments, num_segments=3)
    np.testing.assert_allclose(found, by_segment, rtol=1e-5, atol=1e-6)
    loss = engine.evaluate(cut(inputs, labels, 2 * data))["loss"]
    assert_loss(loss, -wanted.sum() / (labels != -100).sum(), tolerance=1e-5)
    # Training goes on with the loss and the labels that it had.
    engine.train_batch(iter([texts(2 * data)] * 2))


@pytest.mark.slow
def test_a_reference_without_an_optimizer() -> None:
    made = PipelineModule(
        [LayerSpec(nn.Embed, VOCAB, DIM), LayerSpec(nn.Dense, VOCAB)],
        topology=PipeDataParallelTopology(2, 1),
    )
    reference = jaxpipe.initialize(
        model=made, config={"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    )[0]
    inputs, labels = texts(5)
    found = reference.log_probs(inputs, labels)
    assert found.shape == (5,)
    assert np.isfinite(found).all()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(reference.state.params)} == {"bfloat16"}


@pytest.mark.slow
def test_labels_of_log_probabilities() -> None:
    engine = language_model(1, 1)
    inputs, labels = texts(2)
    with pytest.raises(LayerError, match="labels must be integers"):
        engine.log_probs(inputs, labels.astype(np.float32))
    with pytest.raises(LayerError, match="segment_ids must be integers"):
        engine.log_probs(inputs, labels, segment_ids=labels[:, :2], num_segments=2)
    for options in ({"segment_ids": labels}, {"num_segments": 2}, {"num_segments": [2]}):
        assert_refused(LayerError, "num_segments", engine.log_probs, inputs, labels, **options)
    assert_refused(DataError, "same number of samples", engine.log_probs, inputs, labels[:1])
    wrong = labels.copy()
    wrong[0, 0] = VOCAB
    assert np.isnan(engine.log_probs(inputs, wrong)[0])
