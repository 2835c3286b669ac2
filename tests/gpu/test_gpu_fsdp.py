"""Weights divided over `fsdp` on 8 H200s: where a step gathers those of a stage's chunks."""

import functools
import importlib.util
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _h200 import Step, build, h200_mesh

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.programs.compiled import Instruction

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
DIM, HIDDEN, SAMPLES, STAGES, PLACES, CHUNKS = 512, 1536, 1024, 2, 4, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(DIM, use_bias=False)(nn.gelu(nn.Dense(HIDDEN, use_bias=False)(x)))


@functools.cache
def step_of(policy: str) -> Step:
    module = PipelineModule(
        [LayerSpec(Block) for _ in range(STAGES * CHUNKS)],
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
    )
    x = jax.ShapeDtypeStruct((SAMPLES, DIM), jnp.float32)
    mesh = h200_mesh(STAGES, 1, fsdp=PLACES)
    return Step.of(
        build(
            module,
            mesh,
            (x, x),
            8,
            schedule="interleaved",
            num_chunks=CHUNKS,
            gather_weights=policy,
        )
    )


def gathered(lines: list[Instruction]) -> int:
    """Weights that are whole after a gather among these instructions."""
    shapes = {(DIM, HIDDEN), (HIDDEN, DIM)}
    starts = [line for line in lines if re.match(r"all-gather(-start)?$", line.op)]
    return sum(each.dims in shapes for line in starts for each in line.arrays)


def test_weights_are_gathered_in_every_tick_or_in_none() -> None:
    assert [gathered(step_of(policy).steady) for policy in ("tick", "step")] == [4, 0]


def test_a_gather_in_every_tick_holds_less() -> None:
    step, tick = (step_of(policy).memory.temp_size_in_bytes for policy in ("step", "tick"))
    assert tick < step - 2 * 2 * DIM * HIDDEN  # bytes of a chunk in bfloat16
