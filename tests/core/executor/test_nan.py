"""NaNs travel as NaNs, and only where they belong."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import Widen
from _oracle import SCHEDULES, Case
from _settings import make_settings
from _tolerances import assert_close

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.core.executor import PipelinePlan
from jaxpipe.core.pipeline import _pipeline
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.schedules import with_ends_apart, with_idle
from jaxpipe.topology import make_pipeline_mesh

MICROBATCHES, SIZE, ROWS = 4, 4, 8


def build(stages: int, data: int, **kwargs: Any) -> Pipeline:
    settings = dataclasses.replace(make_settings(**kwargs), nonfinite="ignore")
    layers = [LayerSpec(Widen, SIZE) for _ in range(4)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    x = jax.ShapeDtypeStruct((2 * data, SIZE), jnp.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, data))
    return Pipeline(module, optax.sgd(0.1), mesh, (x, x), MICROBATCHES, settings)


def batch(data: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, 2 * data, SIZE)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32), {}


@pytest.mark.parametrize("skip_idle", sweep(1, [False, True]))
@pytest.mark.parametrize(("stages", "data"), sweep(1, [(1, 2), (2, 2), (4, 1)], unpack=True))
def test_one_nan_makes_the_loss_nan(stages: int, data: int, skip_idle: bool) -> None:
    pipeline = build(stages, data, skip_idle=skip_idle)
    for part in (0, 1):
        spoiled = [*batch(data)]
        spoiled[part] = spoiled[part].copy()
        spoiled[part][2, -1, 0] = np.nan
        state, metrics = pipeline.step(pipeline.init(), tuple(spoiled))
        assert np.isnan(float(metrics["loss"]))
        assert np.isnan(float(pipeline.evaluate(pipeline.init(), tuple(spoiled))["loss"]))
        assert all(
            np.isnan(leaf).any() for leaf in jax.tree.leaves(pipeline.params_tree(state.params))
        )


def pole(x: jax.Array) -> jax.Array:
    return x + 0.1 * jnp.sin(1.0 / jnp.sum(x**2, -1, keepdims=True))


def poles(stages: int, schedule: str) -> list[Any]:
    """One for each part, at most four."""
    return [pole, LayerSpec(Widen, SIZE)] * min(Case(stages=stages, schedule=schedule).parts, 4)


LEAKS = [(2, "1f1b"), (4, "zero-bubble-v"), (1, "train"), (2, "split"), (2, "interleaved")]
LEAKS += [
    (2, "dual-pipe-v"),
    (4, "zero-bubble-h1"),
    (2, "zero-bubble-v"),
    (2, "1f1b-v"),
    (4, "1f1b-v"),
    (2, "zero-bubble-2"),
]
LEAKS += [
    (s, name)
    for s in (1, 2, 4)
    for name in ("1f1b", "train", "one_by_one", "split")
    if (s, name) not in LEAKS
]
POLICIES = ((True, False), (False, True), (False, False), (True, True))
"""Whether idle actions are skipped, and whether the last layers' losses come a tick later."""
SENT_EARLY = ("zero-bubble-v", "dual-pipe-v", "interleaved", "1f1b-v", "zero-bubble-2")


@pytest.mark.parametrize(
    ("stages", "schedule"),
    [*sweep(1, LEAKS[:2], unpack=True), *sweep(0, LEAKS[2:], unpack=True)],
)
def test_masked_actions_do_not_leak(
    monkeypatch: pytest.MonkeyPatch, stages: int, schedule: str
) -> None:
    """A layer that is NaN on zeros.

    Idle actions that compute on empty slots must not spoil anything.

    Nor must what an idle stage sends early, as on accelerators, nor what it computes at the ends of
    a program alone.
    """
    early: list[bool] = []
    apart: list[bool] = []
    plan_of = _pipeline.make_plan

    def make_plan(*args: Any, **kwargs: Any) -> PipelinePlan:
        plan = plan_of(*args, **kwargs)
        program = with_ends_apart(plan.program) if apart[-1] else plan.program
        loops = plan.idle.loops and not early[-1]
        idle = dataclasses.replace(plan.idle, loops=loops, masks_ends=apart[-1])
        return dataclasses.replace(
            plan, program=with_idle(program, idle), idle=idle, sends_early=early[-1]
        )

    monkeypatch.setattr(_pipeline, "make_plan", make_plan)

    layers = poles(stages, schedule)
    results = []
    is_early = schedule in SENT_EARLY
    for skip_idle, sends_early, has_ends_apart in (
        (False, True, False),
        (True, is_early, False),
        (True, is_early, True),
    ):
        early.append(sends_early)
        apart.append(has_ends_apart)
        module = PipelineModule(
            layers,
            num_stages=stages,
            loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
            partition_method="uniform",
        )
        x = jax.ShapeDtypeStruct((2, SIZE), jnp.float32)
        mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, 1))
        kwargs: dict[str, Any] = {"schedule": SCHEDULES[schedule], "skip_idle": skip_idle}
        pipeline = Pipeline(
            module, optax.sgd(0.1), mesh, (x, x), MICROBATCHES, make_settings(**kwargs)
        )
        metrics, grads, _ = pipeline.gradients(pipeline.init(), batch(1))
        results.append(
            (metrics, pipeline.params_tree(grads), pipeline.evaluate(pipeline.init(), batch(1)))
        )
    for leaf in jax.tree.leaves(results):
        assert np.isfinite(np.asarray(leaf)).all()
    for other in results[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), results[0], other
        )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stages", "schedule", "policies"),
    sweep(
        1,
        [
            (2, "1f1b", POLICIES[:2]),
            (2, "1f1b", POLICIES),
            (4, "1f1b", POLICIES),
            (2, "interleaved", POLICIES),
            (2, "split", POLICIES),
            (2, "one_by_one", POLICIES),
        ],
        unpack=True,
    ),
)
def test_nothing_leaks_into_a_split_vocabulary(
    stages: int, schedule: str, policies: tuple[tuple[bool, bool], ...]
) -> None:
    """Nor where the last layers take, a tick later, what an idle stage has left."""
    layers = [nn.Embed(ROWS, SIZE), *poles(stages, schedule)]
    tokens = np.random.default_rng(0).integers(0, ROWS, (MICROBATCHES, 2, 3))
    x, mesh = (
        jax.ShapeDtypeStruct((2, 3), jnp.int32),
        make_pipeline_mesh(PipeDataParallelTopology(stages, 1)),
    )
    results = []
    for skip_idle, overlaps in policies:
        module = PipelineModule(
            [*layers, pole, nn.Dense(ROWS)], num_stages=stages, loss_fn=cross_entropy
        )
        kwargs: dict[str, Any] = {"schedule": SCHEDULES[schedule], "skip_idle": skip_idle}
        config = make_settings(split_vocabulary=True, overlap_vocabulary=overlaps, **kwargs)
        pipeline = Pipeline(module, optax.sgd(0.1), mesh, (x, x), MICROBATCHES, config)
        metrics, grads, _ = pipeline.gradients(pipeline.init(), (tokens, tokens, {}))
        results.append(
            (
                metrics,
                pipeline.params_tree(grads),
                pipeline.evaluate(pipeline.init(), (tokens, tokens, {})),
            )
        )
    for leaf in jax.tree.leaves(results):
        assert np.isfinite(np.asarray(leaf)).all()
    for other in results[1:]:
        assert_close(other, results[0])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def test_a_nan_of_one_step_does_not_outlive_it() -> None:
    pipeline = build(2, 1, skip_idle=False)
    spoiled = batch(1)[0].copy()
    spoiled[0] = np.nan
    metrics, *_ = pipeline.gradients(pipeline.init(), (spoiled, batch(1)[1], {}))
    assert np.isnan(float(metrics["loss"]))
    metrics, *_ = pipeline.gradients(pipeline.init(), batch(1))
    assert np.isfinite(float(metrics["loss"]))
