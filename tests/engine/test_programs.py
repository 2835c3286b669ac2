"""Batches of other shapes and sizes than the first."""

import dataclasses
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import assert_refused
from _small import MICROBATCH, apply, build, build_alone, entries, entry, mean_square, module

from jaxpipe import LayerSpec, PipelineEngine
from jaxpipe.core.planner import candidates
from jaxpipe.engine._programs import MAX_PROGRAMS
from jaxpipe.errors import DataError


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    made = build(optimizer=None, example_batch=entry(0, 3))
    assert float(made.eval_batch(entries(0, 3))) > 0
    return made


def evaluate(engine: PipelineEngine, length: int) -> None:
    losses = [mean_square(jnp.asarray(apply(engine, x)), y) for x, y in entries(0, length)]
    np.testing.assert_allclose(engine.eval_batch(entries(0, length)), np.mean(losses), rtol=1e-5)


@pytest.mark.slow
def test_a_new_length_compiles_once_and_says_so(
    engine: PipelineEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(engine, 5)
    first = engine.pipeline
    evaluate(engine, 3)
    evaluate(engine, 5)
    assert engine.pipeline is first
    lines = capsys.readouterr().err.splitlines()
    of = "2 microbatches of inputs float32[2, 5, 4], labels float32[2, 5, 1]"
    assert lines[0] == f"compiling evaluation for {of}"
    assert [line for line in lines if "[2, 5, 4]" in line] == lines[:1]


def test_another_number_of_microbatches_compiles_too(
    engine: PipelineEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(engine, 3)
    capsys.readouterr()
    engine.eval_batch(entries(0, 3, count=1), num_micro_batches=1)
    engine.predict(entry(0, 3)[0])
    lines = capsys.readouterr().err.splitlines()
    assert lines[::2] == [
        "compiling evaluation for 1 microbatch of inputs float32[2, 3, 4], labels float32[2, 3, 1]",
        "compiling prediction for 1 microbatch of inputs float32[2, 3, 4]",
    ]


@pytest.mark.slow
def test_products_have_the_precision_of_each_call() -> None:
    engine = build_alone()

    def precisions() -> set[str]:
        engine.train_batch(entries(0, 3))
        pipeline = engine.pipeline
        assert pipeline is not None
        lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).as_text()
        return {
            line.partition("precision = ")[2][:17]
            for line in lowered.splitlines()
            if "dot_general" in line
        }

    assert precisions() == {"[DEFAULT, DEFAULT"}
    with jax.default_matmul_precision("highest"):
        assert precisions() == {"[HIGHEST, HIGHEST"}
    assert precisions() == {"[DEFAULT, DEFAULT"}


@pytest.mark.slow
def test_programs_are_bounded_and_can_be_dropped(
    engine: PipelineEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.reset_activation_shape()
    evaluate(engine, 3)
    oldest = engine.pipeline
    for length in range(10, 9 + MAX_PROGRAMS):
        engine.eval_batch(entries(0, length), compute_loss=False)
    assert len(engine._trainer.programs) == MAX_PROGRAMS
    evaluate(engine, 3)
    assert engine.pipeline is oldest
    caplog.clear()
    engine.eval_batch(entries(0, 40), compute_loss=False)
    assert len(engine._trainer.programs) == MAX_PROGRAMS
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            "programs for 8 shapes of batches are kept: the one least recently used is dropped for "
            "inputs float32[2, 40, 4]. Pad batches to fewer lengths.",
        )
    ]
    evaluate(engine, 3)
    assert engine.pipeline is oldest
    before = jax.device_get(engine.state.params)
    engine.reset_activation_shape()
    assert len(engine._trainer.programs) == 1
    assert engine.pipeline is oldest
    evaluate(engine, 4)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(engine.state.params), before)


def test_many_shapes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = build_alone(optimizer=None, example_batch=entry(0, 2))
    for length in (2, 3, 4, 3, 2, 4):
        engine.eval_batch(entries(0, length), compute_loss=False)
    engine.predict(entry(0, 2)[0])
    assert caplog.records == []  # three shapes, whatever is done with them
    for length in (5, 6, 7):
        engine.eval_batch(entries(0, length), compute_loss=False)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            "batches have come in 4 shapes, and each is a program of its own, which takes as long "
            "to compile as the first: inputs float32[2, 2, 4]; inputs float32[2, 3, 4]; inputs "
            "float32[2, 4, 4]; inputs float32[2, 5, 4]. Pad all microbatches of a step to one of a "
            "few lengths.",
        )
    ]


@pytest.mark.slow
def test_training_goes_on_over_lengths() -> None:
    engine = build()
    engine.predict(entry(0, 3)[0])
    for length in (3, 5, 3):
        losses = [mean_square(jnp.asarray(apply(engine, x)), y) for x, y in entries(0, length)]
        np.testing.assert_allclose(
            engine.train_batch(entries(0, length)), np.mean(losses), rtol=1e-5
        )
    assert engine.global_steps == int(engine.state.step) == 3


@pytest.mark.slow
def test_a_schedule_is_chosen_for_training_whatever_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = []

    def choose(job: Any, asked: Any) -> Any:
        planned.append(job.num_microbatches)
        return candidates(job, dataclasses.replace(asked, schedules=("gpipe",)))

    monkeypatch.setattr("jaxpipe.core.planner._make.candidates", choose)
    engine = build(config={"pipeline": {"schedule": "auto"}, "gradient_accumulation_steps": 3})
    engine.predict(entry(0, 3)[0])
    assert engine.pipeline.batches.num_microbatches == 1
    engine.train_batch(entries(0, 3, count=3))
    assert (planned, engine.pipeline.batches.num_microbatches) == ([3], 3)
    assert engine.pipeline.plan.schedule.__name__ == "GPipeSchedule"


def test_what_was_chosen_for_refused_shapes_is_forgotten_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a load that was refused.

    Schedule and cut are chosen anew for the shapes that come.
    """
    chosen = iter(["gpipe", "1f1b"])

    def choose(job: Any, asked: Any) -> Any:
        return candidates(job, dataclasses.replace(asked, schedules=(next(chosen),)))

    monkeypatch.setattr("jaxpipe.core.planner._make.candidates", choose)
    engine = build_alone(config={"pipeline": {"schedule": "auto"}})
    names = []
    for length in (3, 5):
        engine._trainer.programs.forget()
        engine._trainer.build_for(entry(0, length))
        names.append(engine.pipeline.plan.schedule.__name__)
    assert names == ["GPipeSchedule", "OneFOneBSchedule"]


def test_shapes_that_would_change_the_parameters() -> None:
    engine = build(
        module(lambda x: x.reshape(x.shape[0], -1), LayerSpec(nn.Dense, 1)), optimizer=None
    )
    labels = np.zeros((2, 1), np.float32)
    engine.eval_batch(iter([(x, labels) for x, _ in entries(0, 3)]))
    words = (
        "inputs=float32[2, 5, 4] with layers/1_Dense/kernel=float32[20, 1] where "
        "inputs=float32[2, 3, 4] had layers/1_Dense/kernel=float32[12, 1]. Pad or cut"
    )
    longer = iter([(x, labels) for x, _ in entries(0, 5)])
    assert_refused(DataError, words, engine.eval_batch, longer)
    assert engine.eval_batch(iter([(x, labels) for x, _ in entries(0, 3)])) > 0


class Cache(nn.Module):
    """Keeps something as long as its input."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.variable("cache", "seen", jnp.zeros, x.shape[1:])
        return nn.Dense(1)(x)


def test_shapes_that_would_change_the_rest_of_the_state() -> None:
    engine = build(module(jnp.sin, LayerSpec(Cache)), optimizer=None)
    engine.eval_batch(entries(0, 3))
    words = "inputs=float32[2, 5, 4] for which ... or keep different ... [2, 3, 4]. Pad or cut"
    assert_refused(DataError, words, engine.eval_batch, entries(0, 5))


@pytest.mark.slow
def test_the_size_of_a_batch_can_change() -> None:
    engine = build(module(data=2), example_batch=entry(samples=2 * MICROBATCH))
    assert engine.train_batch_size() == 8
    engine.set_train_batch_size(12)
    assert engine.gradient_accumulation_steps() == engine.micro_batches == 3
    assert engine.train_batch_size() == 12
    assert engine.micro_batch_size == MICROBATCH
    iterator = entries(count=4, samples=2 * MICROBATCH)
    assert np.isfinite(float(engine.train_batch(iterator)))
    assert len(list(iterator)) == 1
    assert engine.global_samples == 12
    assert engine.pipeline.batches.num_microbatches == 3
