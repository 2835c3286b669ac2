"""State of an engine that has seen no batch."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from _refusals import assert_refused
from _small import MICROBATCH, SIZES, build, build_alone, entries, entry, module

from jaxpipe import LayerSpec
from jaxpipe.errors import LayerError, PipelineError


def parameters() -> Any:
    return module().init(jax.random.key(3), entry()[0])


def test_shapes_are_asked_for_with_an_example(tmp_path: Path) -> None:
    engine = build_alone()
    words = (
        "must know the shapes ... but none has been seen. Give initialize(example_batch=(inputs, "
        f"labels)) arrays or jax.ShapeDtypeStructs of {MICROBATCH} samples ... such as "
        f"jax.ShapeDtypeStruct(({MICROBATCH}, 128), jnp.int32); or training_data="
    )
    assert_refused(PipelineError, words, engine.module_state_dict)
    assert_refused(PipelineError, words, engine.module_collections)
    assert_refused(PipelineError, words, engine.save_checkpoint, tmp_path)
    assert list(tmp_path.iterdir()) == []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), entry())
    engine = build_alone(example_batch=shapes)
    engine.save_checkpoint(tmp_path)
    assert (tmp_path / "global_step0").is_dir()
    assert set(engine.module_state_dict()["layers"]) == {"0_Dense", "1_Dense"}


def test_given_parameters_need_no_batch() -> None:
    params = parameters()
    engine = build_alone(model_parameters=params)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), params)
    for leaf in jax.tree.leaves(engine.module_state_dict()):
        leaf += 1.0  # a copy
    engine.eval_batch(entries())
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), params)


def test_parameters_are_checked_as_soon_as_shapes_are_known() -> None:
    params = parameters()
    del params["layers"]["1_Dense"]["bias"]
    words = "missing layers/1_Dense/bias. Pass a tree as PipelineModule.init"
    assert_refused(LayerError, words, build_alone, model_parameters=params, example_batch=entry())


@pytest.mark.slow
def test_evaluating_without_a_loss_names_predict() -> None:
    engine = build(module(loss_fn=None))
    words = "got float32[2, 1]. Without loss_fn it is the loss; ... call predict(inputs). Return"
    assert_refused(LayerError, words, engine.eval_batch, entries())
    assert engine.predict(entry()[0]).shape == (MICROBATCH, 1)


class Empty(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.param("none", nn.initializers.zeros, (0, 4)).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("Adam", 1), ("Adam", 2), ("Lamb", 1)])
def test_a_parameter_without_elements_in_shards(name: str, stage: int) -> None:
    config = {
        **SIZES,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": name},
        "zero_optimization": {"stage": stage},
    }
    engine = build(
        module(LayerSpec(Empty), LayerSpec(nn.Dense, 1), stages=1, data=2),
        config,
        example_batch=entry(),
    )
    for _ in range(2):
        tree = engine.module_state_dict()
        assert tree["layers"]["0_Empty"]["none"].shape == (0, 4)
        assert len(engine.opt_state_tree()) > 0
        engine.train_batch(entries())
