"""Embedding and head split over the stages, against the same layers whole on one device."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _layouts import Layout, all_leaves, assert_same, saved, shared_engine, train
from _models import ALL_MODELS, ROWS
from _oracle import Case, cached_reference, make_batch, reference, sequential
from _tolerances import GRADIENT, ROUNDING, assert_close, assert_loss

STEPS, LIMIT = 3, 0.5
ADAM = optax.adamw(1e-2, weight_decay=0.1)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="split_shared", stages=2, data=2, skip_idle=True),
            Case(model="split_shapes", stages=2, cut="uniform", skip_idle=True),
            Case(model="split", stages=2, data=2, skip_idle=True),
            Case(
                model="split", stages=2, data=2, schedule="interleaved", interval=1, skip_idle=False
            ),
            Case(model="split_narrow", stages=2, data=2, skip_idle=True),
            Case(model="split_dtypes", stages=4, schedule="zero-bubble", skip_idle=True),
            Case(model="split_tied", stages=8, schedule="gpipe", skip_idle=False),
            Case(model="split_shared", stages=4, schedule="zero-bubble-v", skip_idle=False),
            Case(model="split_narrow", stages=4, schedule="interleaved", skip_idle=False),
            Case(model="split_tied", stages=4, schedule="zero-bubble", skip_idle=True),
            Case(
                model="split_first",
                stages=2,
                schedule="zero-bubble",
                cut="uniform",
                skip_idle=False,
            ),
            Case(model="split_last", stages=4, schedule="1f1b-v", cut="uniform", skip_idle=True),
        ],
    ),
    ids=str,
)
def test_loss_and_every_gradient(case: Case) -> None:
    pipeline = case.pipeline()
    state = pipeline.init()
    assert_close(pipeline.params_tree(state.params), sequential(case.model)[0])
    metrics, storage, _ = pipeline.gradients(state, case.batch())
    loss, grads = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(storage), grads)
    rows = [row for row in pipeline.stage.params.table[0].values() if row.stage_dim is not None]
    assert {row.master.shape[row.stage_dim] for row in rows} == {ROWS // case.stages}


@pytest.mark.parametrize(
    "case",
    sweep(
        0,
        [
            Case(
                model="split_tied", stages=4, optimizer=ADAM, settings={"gradient_clipping": LIMIT}
            ),
            Case(
                model="split",
                stages=2,
                data=2,
                optimizer=ADAM,
                settings={"gradient_clipping": LIMIT, "zero_stage": 1},
            ),
        ],
    ),
    ids=["tied", "zero"],
)
def test_clipped_adamw(case: Case) -> None:
    pipeline, params = case.pipeline(), sequential(case.model)[0]
    optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), ADAM)
    opt_state, state = optimizer.init(params), pipeline.init()
    for step in range(STEPS):
        batch = make_batch(ALL_MODELS[case.model], case.microbatches, case.data, seed=step)
        loss, grads = reference(
            case.model, batch, case.microbatches, case.data, params=params, step=step
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
        state, metrics = pipeline.step(state, batch)
        assert_loss(metrics["loss"], loss, tolerance=(step + 1) * 1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=GRADIENT)
        assert metrics["grad_norm"] > LIMIT
    assert_close(pipeline.params_tree(state.params), params)
    check_copies(pipeline, state.params)


def check_copies(pipeline: Any, params: Any) -> None:
    """What is not split of the ends is the same on all stages to the bit."""
    tied = pipeline.stage.params.tied
    assert tied
    if pipeline.plan.config.zero_optimization.stage:
        return
    for name in tied:
        leaf = np.asarray(params.stacked[name])
        assert all(np.array_equal(leaf[0], other) for other in leaf[1:])


@pytest.mark.slow
def test_evaluation_and_prediction() -> None:
    model = "split_tied"
    pipeline = Case(model=model, stages=4, schedule="1f1b-v").pipeline()
    module, params = ALL_MODELS[model].module(), sequential(model)[0]
    inputs, labels, side = make_batch(ALL_MODELS[model], 3, 1)
    metrics, outputs = pipeline.programs.evaluate_and_predict(
        pipeline.init(), (inputs, labels, side)
    )
    wanted = np.stack([module.apply(params, x) for x in inputs])
    np.testing.assert_allclose(outputs, wanted, rtol=GRADIENT, atol=GRADIENT)
    losses = [module.loss(y, t) for y, t in zip(wanted, labels, strict=True)]
    assert_loss(metrics["microbatch_losses"], losses, tolerance=GRADIENT)


SPLIT, WHOLE = Layout(4, 1, model="split_tied"), Layout(2, 1, model="whole_tied")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocab")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SPLIT, Layout(2, 2, model="split_tied", zero=1)),
        pytest.param(SPLIT, Layout(1, 1, model="split_tied"), marks=pytest.mark.soak),
        pytest.param(WHOLE, SPLIT, marks=pytest.mark.soak),
        pytest.param(
            Layout(2, 2, model="split_first", zero=1, precision="bf16"),
            Layout(4, 1, model="split_first"),
            marks=pytest.mark.soak,
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_checkpoint_opens_at_any_number_of_stages(
    source: Layout, target: Layout, root: Path
) -> None:
    path, leaves, losses = saved(source, root)
    engine = shared_engine(target)
    engine.load_checkpoint(path)
    assert_same(all_leaves(engine), leaves)
    if source.precision == target.precision:
        assert_loss(train(engine, target, range(3, 5)), losses, tolerance=ROUNDING)
