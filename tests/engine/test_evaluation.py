"""`eval_batch` with all its arguments, and `predict`."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import MODELS
from _refusals import assert_refused
from _small import MICROBATCH, MICROBATCHES, apply, build, entries, entry, module, weighted_square

from jaxpipe import PipeDataParallelTopology, PipelineEngine
from jaxpipe.errors import ConfigError, LayerError

DATA = 2
SAMPLES = MICROBATCH * DATA


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    """Its loss weighs labels; those of the first microbatch mostly do not count."""
    made = build(module(data=DATA, loss_fn=weighted_square))
    made.train_batch(iter(batch()))
    return made


def batch(count: int = MICROBATCHES) -> list[tuple[np.ndarray, np.ndarray]]:
    made = list(entries(count=count, samples=SAMPLES))
    made[0][1][1:] = 0
    return made


def wanted(
    engine: PipelineEngine, count: int = MICROBATCHES
) -> tuple[float, list[float], np.ndarray]:
    """Loss, losses of the microbatches, and outputs."""
    terms, outputs = [], []
    for inputs, labels in batch(count):
        outputs.append(apply(engine, inputs))
        terms.append([float(x) for x in weighted_square(outputs[-1], labels)])
    sums, weights = np.sum(terms, axis=0)
    return sums / weights, [total / weight for total, weight in terms], np.stack(outputs)


@pytest.mark.parametrize("count", [None, 3])
def test_every_combination(engine: PipelineEngine, count: int | None) -> None:
    num_microbatches = count or MICROBATCHES
    loss, losses, outputs = wanted(engine, num_microbatches)
    flags = [False, True]
    for case in product(flags, flags, ["avg", None], flags):
        return_logits, compute_loss, reduce_output, _ = case
        found = engine.eval_batch(iter(batch(num_microbatches)), *case, count)
        if return_logits:
            found, logits = found
            assert logits.shape == outputs.shape, case
            np.testing.assert_allclose(logits, outputs, 1e-5, 1e-6, err_msg=str(case))
        if not compute_loss:
            assert found is None, case
        else:
            right = loss if reduce_output else losses
            np.testing.assert_allclose(found, right, 1e-5, err_msg=str(case))


def test_labels_are_not_looked_at_without_a_loss(engine: PipelineEngine) -> None:
    unlabelled = [(inputs, None) for inputs, _ in batch()]
    loss, logits = engine.eval_batch(iter(unlabelled), return_logits=True, compute_loss=False)
    assert loss is None
    np.testing.assert_allclose(logits, wanted(engine)[2], rtol=1e-5, atol=1e-6)
    strings = [(inputs, "a label") for inputs, _ in batch()]
    assert engine.eval_batch(iter(strings), compute_loss=False) is None


@pytest.mark.parametrize("is_last", [True, False])
def test_bcast_loss_asks_for_a_device_of_the_last_stage(
    engine: PipelineEngine, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    monkeypatch.setattr(engine, "is_last_stage", lambda: is_last)
    assert (engine.eval_batch(iter(batch()), bcast_loss=False) is not None) == is_last
    assert engine.eval_batch(iter(batch())) is not None


def test_arguments_that_are_refused(engine: PipelineEngine) -> None:
    iterator = iter(batch())
    words = "reduce_output must be 'avg' or None, but got reduce_output='sum'. Use None"
    assert_refused(ConfigError, words, engine.eval_batch, iterator, reduce_output="sum")
    for count in (0, True, 2.0):
        words = f"at least 1, but got num_micro_batches={count}. Omit it"
        assert_refused(ConfigError, words, engine.eval_batch, iterator, num_micro_batches=count)
    assert len(list(iterator)) == MICROBATCHES


def test_evaluation_changes_no_state(engine: PipelineEngine) -> None:
    before = jax.device_get((engine.state.params, engine.state.opt_state, engine.state.step))
    engine.eval_batch(iter(batch()), return_logits=True)
    engine.predict(entry()[0])
    after = jax.device_get((engine.state.params, engine.state.opt_state, engine.state.step))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("count", [1, SAMPLES, SAMPLES + 3])
def test_predicting_any_number_of_samples(engine: PipelineEngine, count: int) -> None:
    inputs = entry(samples=count)[0]
    found = engine.predict(inputs)
    assert found.shape == (count, 1)
    assert found.is_fully_replicated
    np.testing.assert_allclose(found, apply(engine, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.soak
def test_predicting_before_anything_else() -> None:
    engine = build()
    inputs = entry()[0]
    np.testing.assert_allclose(engine.predict(inputs), apply(engine, inputs), rtol=1e-5, atol=1e-6)
    assert engine.global_steps == 0
    loss = engine.train_batch(entries())
    assert np.isfinite(float(loss))
    assert engine.pipeline.batches.num_microbatches == MICROBATCHES
    fresh = build()
    assert float(fresh.train_batch(entries())) == float(loss)


@pytest.mark.slow
def test_predicting_with_side_inputs() -> None:
    model = MODELS["side"].module(None, topology=PipeDataParallelTopology(2, 2))
    engine = build(model)
    inputs, _, side = MODELS["side"].batch(np.random.default_rng(0), 5)
    found = engine.predict(inputs, side=side)
    np.testing.assert_allclose(found, apply(engine, inputs, side=side), rtol=1e-5, atol=1e-5)
    pieces = [(inputs[:4], None, jax.tree.map(lambda x: x[:4], side))] * 2
    _, logits = engine.eval_batch(iter(pieces), return_logits=True, compute_loss=False)
    np.testing.assert_allclose(logits[1], found[:4], rtol=1e-5, atol=1e-5)


def test_outputs_without_samples_cannot_be_returned() -> None:
    engine = build(module(jnp.sin, lambda x: jnp.mean(x**2), loss_fn=None), optimizer=None)
    words = "first dim to be returned, 2 here, but got float32[]. Compute ... in loss_fn"
    assert_refused(LayerError, words, engine.predict, entry()[0])
    assert_refused(LayerError, words, engine.eval_batch, entries(), return_logits=True)
    assert float(engine.eval_batch(entries())) == pytest.approx(
        float(np.mean([np.sin(x) ** 2 for x, _ in entries()])), rel=1e-5
    )
