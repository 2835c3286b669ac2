"""One run in any layout.

Dropout, initial weights and evaluation do not depend on how the model is cut.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import MODELS
from _oracle import Case, block_of, evaluation, sequential
from _tolerances import LOSS, ROUNDING, assert_loss

from jaxpipe import PipeDataParallelTopology, Pipeline, microbatch_key
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.3, momentum=0.9)


def losses(case: Case, steps: int = 5) -> list[float]:
    pipeline = case.pipeline()
    state, found = pipeline.init(), []
    for _ in range(steps):
        state, metrics = pipeline.step(state, case.batch())
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def baseline(model: str) -> tuple[float, ...]:
    return tuple(losses(Case(model=model, stages=1, data=2, optimizer=SGD)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="dropout", stages=2, data=2, optimizer=SGD),
            Case(model="dropout", stages=4, data=2, cut="trunk", optimizer=SGD),
            Case(model="dropout", stages=4, data=2, schedule="gpipe", cut="front", optimizer=SGD),
            Case(model="dropout", stages=2, data=2, schedule="train", interval=1, optimizer=SGD),
            Case(
                model="dropout",
                stages=4,
                data=2,
                interval=2,
                scan_trunk=True,
                cut="trunk",
                optimizer=SGD,
            ),
            Case(model="noise", stages=2, data=2, schedule="split", skip_idle=False, optimizer=SGD),
            Case(model="noise", stages=4, data=2, interval=1, optimizer=SGD),
        ],
    ),
    ids=str,
)
def test_the_same_losses(case: Case) -> None:
    np.testing.assert_allclose(losses(case), baseline(case.model), rtol=ROUNDING, atol=0)
    assert len(set(baseline(case.model))) == 5


@pytest.mark.parametrize("model", sweep(0, ["dropout", "noise"]))
def test_apply_with_the_microbatch_key_repeats_the_dropout(model: str) -> None:
    case = Case(model=model, stages=2, data=2, optimizer=optax.set_to_zero())
    pipeline, batch = case.pipeline(), case.batch()
    state = pipeline.init()
    params = sequential(model)[0]
    module = MODELS[model].module()
    for step in range(2):
        state, metrics = pipeline.step(state, batch)
        found = []
        for m in range(case.microbatches):
            for r in range(2):
                inputs, labels, side = block_of(batch, m, r)
                key = microbatch_key(jax.random.key(module.base_seed), step, m, r)
                found.append(
                    module.loss(
                        module.apply(params, inputs, train=True, key=key, side=side), labels
                    )
                )
        assert_loss(metrics["loss"], np.mean(found, dtype=np.float64))


def test_microbatches_replicas_and_steps_draw_differently() -> None:
    key = jax.random.key(0)
    keys = [
        microbatch_key(key, step, m, r) for step in range(3) for m in range(3) for r in range(3)
    ]
    assert len({tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}) == 27


@pytest.mark.parametrize(
    ("stages", "cut"),
    sweep(
        1,
        [
            (2, "front"),
            (1, "uniform"),
            (2, "parameters"),
            (4, "back"),
            (4, "uniform"),
            (8, "parameters"),
        ],
        unpack=True,
    ),
)
@pytest.mark.parametrize("model", sweep(0, ["tied_many", "noise", "linen"]))
def test_initial_weights_are_those_of_the_module(model: str, cut: str, stages: int) -> None:
    pipeline = Case(model=model, stages=stages, cut=cut).pipeline()
    found = pipeline.params_tree(pipeline.init().params)
    jax.tree.map(np.testing.assert_array_equal, found, sequential(model)[0])
    other = pipeline.params_tree(pipeline.init(jax.random.key(5)).params)
    inputs, _, side = block_of(Case(model=model).batch(), 0, 0)
    wanted = MODELS[model].module().init(jax.random.key(5), inputs, side=side)
    jax.tree.map(np.testing.assert_array_equal, other, jax.device_get(wanted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed_fn", sweep(1, [None, jax.random.PRNGKey]), ids=["default", "PRNGKey"]
)
def test_seeded_layers_do_not_depend_on_the_key(seed_fn: Callable[[int], jax.Array] | None) -> None:
    module = MODELS["linen"].module(2, seed_layers=True, seed_fn=seed_fn, base_seed=7)
    entry = jax.tree.map(lambda x: x[0], Case().batch())
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    pipeline = Pipeline(module, optax.identity(), mesh, entry, 1)
    first, second = (jax.device_get(module.init(jax.random.key(seed), entry[0])) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(pipeline.init().params), first)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(stages=4, data=2, microbatches=5, skip_idle=False),
            Case(stages=8, microbatches=2, cut="trunk"),
            Case(stages=1, microbatches=2),
            Case(model="dropout", stages=2, data=2),
            Case(model="tied", stages=4, cut="front"),
            Case(model="tuple", stages=4, data=2, scan_trunk=True),
            Case(model="shapes", stages=4, data=2),
            Case(model="side", stages=2, data=2),
            Case(model="noise", stages=4, interval=1),
            Case(model="no_loss", stages=2),
        ],
    ),
    ids=str,
)
def test_evaluation_is_the_sequential_loss(case: Case) -> None:
    pipeline, batch = case.pipeline(), case.batch()
    metrics = pipeline.evaluate(pipeline.init(), batch)
    assert_loss(
        metrics["loss"], evaluation(case.model, batch, case.microbatches, case.data), tolerance=LOSS
    )
