"""The GPU program's memory, compiled for GPUs that are not there."""

import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _h200 import build, compile_step, h200_mesh

from jaxpipe import LayerSpec, PipelineModule

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
SIZE, SAMPLES, LAYERS = 1024, 512, 8


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(SIZE)(nn.tanh(nn.Dense(SIZE)(x)))


def memory(stages: int, data: int, zero_stage: int, interval: int) -> Any:
    module = PipelineModule(
        [LayerSpec(Block) for _ in range(LAYERS)],
        num_stages=stages,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
        activation_checkpoint_interval=interval,
    )
    x = jax.ShapeDtypeStruct((SAMPLES * data, SIZE), jnp.float32)
    pipeline = build(module, h200_mesh(stages, data), (x, x), zero_stage=zero_stage)
    compiled = compile_step(pipeline)
    kept = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pipeline.stage.residuals)
    )
    return compiled.memory_analysis(), kept, pipeline.plan.program.peak_in_flight


def test_zero_holds_an_eighth_of_the_optimizer_state() -> None:
    whole, divided = (memory(1, 8, stage, 0)[0].argument_size_in_bytes for stage in (0, 1))
    num_params = LAYERS * 2 * (SIZE * SIZE + SIZE)
    masters_and_moments = 3 * 4 * num_params
    assert whole - divided == pytest.approx(7 / 8 * masters_and_moments, rel=0.02)


def test_recompute_lowers_the_ring_to_stage_inputs() -> None:
    plain, kept, in_flight = memory(4, 1, 0, 0)
    less, inputs, _ = memory(4, 1, 0, LAYERS // 4)
    assert inputs == pytest.approx(SAMPLES * SIZE * 2, rel=0.02)
    saved = plain.temp_size_in_bytes - less.temp_size_in_bytes
    assert saved >= 0.8 * in_flight * (kept - inputs)
