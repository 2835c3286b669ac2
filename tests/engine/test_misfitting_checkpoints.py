"""Checkpoints of other models, optimisers and schedules: named differences, and what fits."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _leaves import assert_same, differing, leaves, scalars
from _refusals import assert_refused
from _runs import Run, batch, run_of
from _small import FEATURES, build, module

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.errors import CheckpointError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("misfitting")


@pytest.fixture
def adam(root: Path) -> Run:
    return run_of("adam", root)


def dense(*widths: int, **kwargs: Any) -> PipelineModule:
    return module(*(LayerSpec(nn.Dense, width) for width in widths), data=2, **kwargs)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ("warmup-zero", "adam", r"unexpected: hyperparams_st"),
        ("adam", "warmup-zero", r"missing: hyperparams_states/le"),
    ],
    ids=["with-without", "without-with"],
)
def test_another_schedule(source: str, target: str, match: str, root: Path) -> None:
    run, other = run_of(source, root), run_of(target, root)
    engine, early = other.engine, other.early
    engine.load_checkpoint(other.folder, "early")
    with pytest.raises(CheckpointError, match=rf"state of the optimizer in use, but got {match}"):
        engine.load_checkpoint(run.folder)
    engine.load_checkpoint(run.folder, load_lr_scheduler_states=False)
    found = leaves(engine)
    rates = {key for key in found if key.startswith(other.kind.schedule)}
    assert_same(found, early.leaves, rates)
    assert_same(found, run.late.leaves, set(found) - rates)
    assert engine.get_lr() == early.rates


@pytest.fixture(scope="module")
def other() -> Any:
    """An engine of three layers, of which the first is that of the others."""
    engine = build(dense(3, 2, 1))
    engine.train_batch(batch(7))
    return engine


@pytest.mark.slow
def test_a_refused_load_leaves_shapes_open(root: Path, adam: Run) -> None:
    wide = build(dense(5, 1), example_batch=tuple(np.ones((4, n), np.float32) for n in (7, 1)))
    wide.save_checkpoint(root / "wide")
    engine = build(dense(3, 1))
    words = "layers/0_Dense/kernel (float32[7, 5], not float32"
    assert_refused(CheckpointError, words, engine.load_checkpoint, root / "wide")
    engine.load_checkpoint(adam.folder)
    assert_same(leaves(engine), adam.late.leaves)


@pytest.mark.slow
def test_what_fits_is_loaded(adam: Run, other: Any) -> None:
    before = leaves(other)
    with pytest.warns(
        UserWarning,
        match=r"missing: layers/2_Dense; of another shape: layers/1_Dense/bias .*keep their",
    ):
        other.load_checkpoint(adam.folder, load_module_strict=False)
    found = leaves(other)
    rest = {key for key in found if "1_Dense" in key or "2_Dense" in key}
    assert len(rest) == 12
    assert_same(found, before, rest)
    assert_same(found, adam.late.leaves, set(found) - rest)
    assert not differing({key: before[key] for key in rest}, found)
    assert len(differing(before, found)) == 9  # the first layer's, the count, the step and the rate
    assert scalars(other) == adam.late.scalars
    assert np.isfinite(float(other.train_batch(batch(3))))


@pytest.mark.slow
def test_what_fits_in_an_engine_that_has_no_state_yet(adam: Run) -> None:
    engine = build(module(LayerSpec(nn.Dense, 3), LayerSpec(nn.Dense, 1, use_bias=False), data=2))
    with pytest.warns(UserWarning, match=r"unexpected: layers/1_Dense/bias\. The rest is"):
        engine.load_checkpoint(adam.folder, load_module_strict=False)
    assert_same(leaves(engine), adam.late.leaves, leaves(engine))


def test_warnings_name_the_line_that_loads(adam: Run) -> None:
    layers = LayerSpec(nn.Dense, 3, param_dtype=jnp.bfloat16), LayerSpec(nn.Dense, 2)
    engine = build(module(*layers, data=2))
    with pytest.warns(UserWarning, match="of another shape|another dtype") as caught:
        engine.load_checkpoint(adam.folder, load_module_strict=False)
    unfit, cast = (str(one.message) for one in caught)
    assert "of another shape: layers/1_Dense/bias (float32[1], not float32[2])" in unfit
    assert "params/layers/0_Dense/bias from float32 to bfloat16" in cast
    assert {one.filename for one in caught} == {__file__}
    kernel = engine.module_state_dict()["layers"]["0_Dense"]["kernel"]
    wanted = adam.late.leaves["params/layers/0_Dense/kernel"]
    np.testing.assert_array_equal(kernel, wanted.astype(jnp.bfloat16))


@pytest.mark.slow
def test_given_parameters_stay_where_nothing_fits(adam: Run) -> None:
    given = dense(3, 2, stages=1).init(jax.random.key(9), np.ones((2, FEATURES), np.float32))
    engine = build(dense(3, 2), model_parameters=given)
    with pytest.warns(UserWarning, match=r"of another shape: layers/1_Dense/bias \("):
        engine.load_checkpoint(adam.folder, load_module_strict=False)
    held = engine.module_state_dict()
    jax.tree.map(
        np.testing.assert_array_equal, held["layers"]["1_Dense"], given["layers"]["1_Dense"]
    )
    np.testing.assert_array_equal(
        held["layers"]["0_Dense"]["bias"], adam.late.leaves["params/layers/0_Dense/bias"]
    )


def test_another_optimizer(adam: Run) -> None:
    engine = build(dense(3, 1), optimizer=optax.sgd(0.1, momentum=0.9))
    words = (
        "state of the optimizer in use, but got missing: 0/trace/layers/0_Dense, ... unexpected: "
        "count, ... Use the same ... or reset its state with load_optimizer_states=False"
    )
    assert_refused(CheckpointError, words, engine.load_checkpoint, adam.folder)
    assert engine.global_steps == 0
    engine.load_checkpoint(adam.folder, load_optimizer_states=False)
    found = leaves(engine)
    assert_same(found, adam.late.leaves, [key for key in found if key.startswith("params/")])
    assert not any(found[key].any() for key in found if key.startswith("opt_state/"))
    assert engine.global_steps == 3


def test_training_less_than_before(adam: Run) -> None:
    """The refusal names the argument with which the moments of what is trained are kept."""
    engine = build(dense(3, 1, trainable="1_Dense"))
    words = "unexpected: inner_state/0/mu/layers/0_Dense, ... what fits ... load_module_strict=F"
    assert_refused(CheckpointError, words, engine.load_checkpoint, adam.folder)
    with pytest.warns(
        UserWarning, match=r"unexpected: inner_state/0/mu/layers/0_Dense, .*What fits is loaded"
    ) as caught:
        engine.load_checkpoint(adam.folder, load_module_strict=False)
    assert caught[0].filename == __file__
    found = leaves(engine)
    assert_same(found, adam.late.leaves, found)
    assert any(
        key.startswith("opt_state/") and "1_Dense" in key and found[key].any() for key in found
    )


@pytest.mark.slow
def test_without_an_optimizer(adam: Run, tmp_path: Path) -> None:
    engine = build(dense(3, 1), optimizer=None)
    engine.load_checkpoint(adam.folder)
    assert_same(leaves(engine), adam.late.leaves, leaves(engine))
    adam.engine.load_checkpoint(adam.folder)
    assert float(engine.eval_batch(batch(5))) == float(adam.engine.eval_batch(batch(5)))
    engine.save_checkpoint(tmp_path)
    words = "but got missing: count, ... load_optimizer_states=False"
    assert_refused(CheckpointError, words, adam.engine.load_checkpoint, tmp_path)
    adam.engine.load_checkpoint(
        tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False
    )
    assert_same(leaves(adam.engine), adam.late.leaves)
