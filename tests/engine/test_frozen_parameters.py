"""Frozen parameters in an engine: what it holds, what it saves, and what opens again."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import SIZES, build, entry, module

import jaxpipe
from jaxpipe import LayerSpec, PipelineEngine, checkpoint
from jaxpipe.core.state import state_arrays
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict

BIASES = "bias$"


def engine(
    *, trainable: Any = BIASES, stages: int = 2, data: int = 1, **config: Any
) -> PipelineEngine:
    model = module(
        *[LayerSpec(nn.Dense, 4) for _ in range(4)], stages=stages, data=data, trainable=trainable
    )
    return build(model, config, example_batch=entry(samples=2 * data))


def batches(count: int, samples: int = 2) -> Any:
    return iter([entry(seed, samples=samples) for seed in range(2 * count)])


def leaves(one: PipelineEngine) -> dict[str, np.ndarray]:
    return {"/".join(path): leaf for path, leaf in flatten_dict(one.module_state_dict()).items()}


@pytest.mark.slow
def test_a_checkpoint_without_what_is_frozen_opens_on_top_of_it(tmp_path: Path) -> None:
    base = engine(trainable=None).module_state_dict()
    one = engine(data=2, zero_optimization={"stage": 1}, bf16={"enabled": True})
    one.load_module_state_dict(base)
    for _ in range(2):
        one.train_batch(batches(1, samples=4))
    one.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = checkpoint.load_params(tmp_path)
    assert {path[-1] for path in flatten_dict(saved)} == {"bias"}
    assert not any("frozen" in name for name in checkpoint.open_checkpoint(tmp_path).index.arrays)

    two = engine(stages=4, bf16={"enabled": True})
    two.load_module_state_dict(base)
    two.load_checkpoint(tmp_path)
    assert two.global_steps == 2
    found, wanted = leaves(two), leaves(one)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf)
    words = "must hold the layers of the model, but got missing: layers/0_Dense/kern"
    whole = engine(trainable=None, bf16={"enabled": True})
    assert_refused(CheckpointError, words, whole.load_checkpoint, tmp_path)


@pytest.mark.slow
def test_a_whole_checkpoint_goes_both_ways(tmp_path: Path) -> None:
    one = engine()
    one.train_batch(batches(1))
    one.save_checkpoint(tmp_path)
    assert len(flatten_dict(checkpoint.load_params(tmp_path))) == 8
    other = engine(trainable=None)
    other.load_checkpoint(tmp_path, load_module_only=True)
    for name, leaf in leaves(one).items():
        np.testing.assert_array_equal(leaves(other)[name], leaf)


@pytest.mark.slow
def test_frozen_parameters_are_held_once_in_the_dtype_they_compute_in() -> None:
    one = engine(bf16={"enabled": True})
    arrays = state_arrays(one.state)
    kernels = [name for name in arrays if "kernel" in name or "frozen" in name]
    assert kernels
    assert {arrays[name].dtype for name in kernels} == {jnp.dtype("bfloat16")}
    assert not any(name.startswith("opt_state") for name in kernels)
    assert {leaf.dtype for name, leaf in leaves(one).items() if name.endswith("bias")} == {
        np.dtype("float32")
    }
    one.train_batch(batches(1))
    one.set_lr(0.5)
    one.train_batch(batches(1))


@pytest.mark.slow
def test_a_step_needs_less_memory() -> None:
    """Of 4 bytes a parameter each: Adam's two moments, and the sum of gradients."""
    wide, sizes = 256, []
    for trainable in (None, BIASES):
        model = module(*[LayerSpec(nn.Dense, wide) for _ in range(4)], trainable=trainable)
        x = jax.ShapeDtypeStruct((2, wide), jnp.float32)
        pipeline = build(model, example_batch=(x, x)).pipeline
        memory = (
            pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
            .compile()
            .memory_analysis()
        )
        sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes))
    per_stage = 4 * 2 * wide * wide
    (arguments, temporaries), (fewer, less) = sizes
    assert 0.99 * 2 * per_stage <= arguments - fewer <= 2 * per_stage
    assert temporaries - less >= 0.99 * per_stage


@pytest.mark.soak
@pytest.mark.parametrize("zero_stage", sweep(1, [1, 0, 3]))
@pytest.mark.parametrize("dtype", sweep(1, ["bf16", "fp16"]))
def test_without_an_optimizer_all_are_held_in_the_dtype_they_compute_in(
    dtype: str, zero_stage: int, tmp_path: Path
) -> None:
    sections = {dtype: {"enabled": True}, "zero_optimization": {"stage": zero_stage}}
    trained = engine(trainable=None, data=2, **sections)
    trained.train_batch(batches(1, samples=4))
    trained.save_checkpoint(tmp_path)
    inputs, wanted = entry(samples=4)[0], trained.module_state_dict()
    kept = jnp.dtype("bfloat16" if dtype == "bf16" else "float16")
    narrow = jax.tree.map(lambda leaf: leaf.astype(kept), wanted)
    model = module(*[LayerSpec(nn.Dense, 4) for _ in range(4)], data=2)
    for model_parameters in (wanted, None):
        reference, *_ = jaxpipe.initialize(
            model=model,
            config={**SIZES, **sections},
            model_parameters=model_parameters,
            example_batch=entry(samples=4),
        )
        if model_parameters is None:
            reference.load_checkpoint(tmp_path, load_module_only=True)
        assert {leaf.dtype for leaf in jax.tree.leaves(reference.state.params)} == {kept}
        np.testing.assert_array_equal(reference.predict(inputs), trained.predict(inputs))
        losses = [float(each.eval_batch(batches(1, samples=4))) for each in (reference, trained)]
        assert losses[0] == losses[1]
        jax.tree.map(np.testing.assert_array_equal, reference.module_state_dict(), narrow)
