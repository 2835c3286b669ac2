"""What an engine does with batches, and what it refuses."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import ALL_MODELS, VOCAB, Block, Embed, Head, Model
from _oracle import evaluation, make_batch, reference, sequential
from _refusals import assert_refused
from _tolerances import assert_close, assert_loss

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineEngine
from jaxpipe.errors import DataError, LayerError, PipelineError

SGD = optax.sgd(0.1, momentum=0.9)
MICROBATCHES = 3


ALL_MODELS["small"] = Model(lambda: [Embed(), Block(), Block(), Head()])


def build(name: str = "small", optimizer: Any = SGD, **kwargs: Any) -> PipelineEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        **kwargs.pop("config", {}),
    }
    module = ALL_MODELS[name].module(None, topology=PipeDataParallelTopology(2, 2))
    return jaxpipe.initialize(model=module, optimizer=optimizer, config=config, **kwargs)[0]


def entries(seed: int = 0, name: str = "small", count: int = MICROBATCHES) -> list[Any]:
    batch = make_batch(ALL_MODELS[name], MICROBATCHES, 2, seed)
    return [jax.tree.map(lambda x, m=m: x[m], batch) for m in range(count)]


def snapshot(engine: PipelineEngine) -> Any:
    return jax.device_get((engine.state.step, engine.state.params, engine.state.opt_state))


@pytest.fixture(scope="module")
def shared() -> PipelineEngine:
    engine = build()
    engine.train_batch(iter(entries()))
    return engine


@pytest.mark.parametrize("name", sweep(1, ["small", "side", "tied"]))
def test_training_and_evaluating(name: str) -> None:
    engine = build(name)
    batch = make_batch(ALL_MODELS[name], MICROBATCHES, 2)
    assert_loss(
        engine.eval_batch(iter(entries(name=name))), evaluation(name, batch, MICROBATCHES, 2)
    )
    assert engine.global_steps == 0
    loss, grads = reference(name, batch, MICROBATCHES, 2)
    found = engine.train_batch(iter(entries(name=name)))
    assert isinstance(found, jax.Array)
    assert found.shape == ()
    assert_loss(found, loss)
    assert (engine.global_steps, engine.global_samples) == (1, 12)
    params = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, sequential(name)[0], grads)
    assert_close(engine.module_state_dict(), params)


@pytest.mark.slow
def test_a_short_iterator_changes_nothing(shared: PipelineEngine) -> None:
    before, counters = snapshot(shared), (shared.global_steps, shared.global_samples)
    for count in range(MICROBATCHES):
        with pytest.raises(StopIteration):
            shared.train_batch(iter(entries(count=count)))
        words = f"must have {MICROBATCHES} more entries for an evaluation, but got {count} from"
        assert_refused(DataError, words, shared.eval_batch, iter(entries(count=count)))
    jax.tree.map(np.testing.assert_array_equal, snapshot(shared), before)
    assert (shared.global_steps, shared.global_samples) == counters
    assert np.isfinite(float(shared.train_batch(iter(entries()))))


def test_an_entry_that_does_not_fit_changes_nothing(shared: PipelineEngine) -> None:
    before, counters = snapshot(shared), (shared.global_steps, shared.global_samples)
    first, (x, y, _) = entries()[:2]
    for words, spoilt in (
        ("must be a tuple (inputs, labels) ... Yield such tuples, or map them with set_batch", x),
        ("inputs must have the same shape everywhere ... shape=(3, 3)", (x[:3], y, {})),
        ("inputs must have the same dtype everywhere", (x.astype(np.float32), y, {})),
    ):
        batch = iter([first, spoilt, *entries()[2:]])
        assert_refused(DataError, words, shared.train_batch, batch)
    jax.tree.map(np.testing.assert_array_equal, snapshot(shared), before)
    assert (shared.global_steps, shared.global_samples) == counters


@pytest.mark.slow
def test_a_first_batch_that_does_not_fit() -> None:
    engine = build()
    cut = iter([jax.tree.map(lambda x: x[:3], entry) for entry in entries()])
    words = "2 * 2 = 4 samples ... int32[3, 3]. Yield 4 samples per entry"
    assert_refused(DataError, words, engine.train_batch, cut)
    assert engine.global_steps == 0
    assert np.isfinite(float(engine.train_batch(iter(entries()))))


def test_iterators(shared: PipelineEngine) -> None:
    engine = build()
    words = (
        "from an iterator, but got data_iter=None ... Pass an iterator, or call set_dataiterator"
    )
    assert_refused(PipelineError, words, engine.train_batch)
    endless = jaxpipe.RepeatingLoader(entries())
    engine.set_dataiterator(endless)
    first = float(engine.train_batch())
    place = endless.get_state()
    words = "iterator of its own, but got data_iter=None ... iter(eval_loader)"
    assert_refused(PipelineError, words, engine.eval_batch)
    assert endless.get_state() == place
    assert float(engine.train_batch()) < first
    assert engine.global_steps == 2


@pytest.mark.slow
def test_set_batch_fn_maps_every_entry() -> None:
    engine, plain = build(), build()
    engine.set_batch_fn(lambda entry: (entry["x"], entry["y"]))
    mapped = iter([{"x": x, "y": y} for x, y, _ in entries()])
    assert float(engine.train_batch(mapped)) == float(plain.train_batch(iter(entries())))
    engine.set_batch_fn(None)
    assert np.isfinite(float(engine.train_batch(iter(entries()))))


def test_without_an_optimizer_it_only_evaluates() -> None:
    engine = build(optimizer=None)
    batch = make_batch(ALL_MODELS["small"], MICROBATCHES, 2)
    assert_loss(engine.eval_batch(iter(entries())), evaluation("small", batch, MICROBATCHES, 2))
    words = "got optimizer=None. Give initialize(optimizer=...)"
    assert_refused(PipelineError, words, engine.train_batch, iter(entries()))


@pytest.mark.slow
def test_parameters_go_out_and_come_back() -> None:
    engine = build()
    engine.train_batch(iter(entries()))
    saved = engine.module_state_dict()
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(saved))
    assert jax.tree.structure(saved) == jax.tree.structure(sequential("small")[0])
    outputs = ALL_MODELS["small"].module().apply(saved, entries()[0][0])
    assert outputs.shape == (4, 3, VOCAB)
    losses = [float(engine.train_batch(iter(entries(1)))) for _ in range(2)]
    opt_state = jax.device_get(engine.state.opt_state)
    engine.load_module_state_dict(saved)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), saved)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(engine.state.opt_state), opt_state)
    assert engine.global_steps == int(engine.state.step) == 3
    assert float(engine.train_batch(iter(entries(1)))) == pytest.approx(losses[0], rel=1e-6)


def test_loading_is_strict_unless_told_otherwise(shared: PipelineEngine) -> None:
    before = shared.module_state_dict()
    partial = {"layers": {**before["layers"], "new": {"w": np.ones(2, np.float32)}}}
    partial["layers"]["3_Head"] = {
        "Dense_0": {"bias": np.full(VOCAB, 7.0, np.float32), "kernel": np.ones((1, 1))}
    }
    words = "missing layers/3_Head/LayerNorm_0/ ... unexpected layers/new/w ... Pass a tree"
    assert_refused(LayerError, words, shared.load_module_state_dict, partial)
    jax.tree.map(np.testing.assert_array_equal, shared.module_state_dict(), before)
    match = r"left out 4 parameters.*3_Head/Dense_0/kernel.*3_Head/LayerNorm_0/.*layers/new/w"
    with pytest.warns(UserWarning, match=match):
        shared.load_module_state_dict(partial, strict=False)
    after = shared.module_state_dict()
    np.testing.assert_array_equal(after["layers"]["3_Head"]["Dense_0"]["bias"], 7.0)
    after["layers"]["3_Head"]["Dense_0"]["bias"] = before["layers"]["3_Head"]["Dense_0"]["bias"]
    jax.tree.map(np.testing.assert_array_equal, after, before)
    shared.load_module_state_dict(before, strict=False)
    jax.tree.map(np.testing.assert_array_equal, shared.module_state_dict(), before)


def whole_batch(length: int = 3) -> tuple[Any, Any]:
    shape = jax.ShapeDtypeStruct((MICROBATCHES, 4, length), np.int32)
    return shape, shape


@pytest.mark.slow
def test_lowering_the_step() -> None:
    engine = build()
    lowered = engine.lower(whole_batch())
    assert isinstance(lowered, jax.stages.Lowered)
    assert lowered.compile().memory_analysis().temp_size_in_bytes > 0
    assert engine.global_steps == 0
    longer = engine.lower(whole_batch(5))
    assert longer.in_avals[0][1][0].shape == (3, 4, 5)
    short = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), whole_batch())
    words = "inputs must be int32[3, 4, 3] ... got int32[2, 4, 3]. Give every"
    assert_refused(DataError, words, engine.lower, short)
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), whole_batch())
    assert engine.lower((*arrays, {})).as_text() == lowered.as_text()


def test_lowering_does_not_make_parameters() -> None:
    engine = build(example_batch=entries()[0])
    engine.lower(whole_batch())
    assert not engine._trainer.has_state


def test_a_step_says_nothing_unless_asked(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], shared: PipelineEngine
) -> None:
    with caplog.at_level(logging.DEBUG, "jaxpipe"):
        shared.train_batch(iter(entries()))
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def test_an_iterator_is_read_no_further_than_the_batch(shared: PipelineEngine) -> None:
    pulled = []

    def source() -> Iterator[Any]:
        for entry in entries() * 3:
            pulled.append(1)
            yield entry

    iterator = source()
    shared.train_batch(iterator)
    assert len(pulled) == MICROBATCHES
    shared.eval_batch(iterator)
    assert len(pulled) == 2 * MICROBATCHES


def test_the_state_counts_steps(shared: PipelineEngine) -> None:
    before = int(shared.state.step)
    shared.train_batch(iter(entries()))
    assert int(shared.state.step) == before + 1
