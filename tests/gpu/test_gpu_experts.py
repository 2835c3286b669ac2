"""The step of a mixture of experts without a capacity, on H200s: what it computes and sends."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from _h200 import Step, build, h200_mesh

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.models import Experts, ExpertsConfig

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
DIM, HIDDEN, TIME, SAMPLES, STAGES, PLACES, BLOCKS = 512, 768, 256, 8, 2, 2, 4
NUM_EXPERTS, CHOICES = 8, 2
TOKENS = SAMPLES * TIME
ROOM = TOKENS * CHOICES * 5 // 4 // NUM_EXPERTS


@functools.cache
def step_of() -> Step:
    config = ExpertsConfig(NUM_EXPERTS, CHOICES, HIDDEN)
    module = PipelineModule(
        [LayerSpec(Experts, config) for _ in range(BLOCKS)],
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
    )
    x = jax.ShapeDtypeStruct((SAMPLES, TIME, DIM), jnp.float32)
    return Step.of(build(module, h200_mesh(STAGES, 1, expert=PLACES), (x, x), 8))


def test_tokens_are_summed_once_in_each_direction_and_never_exchanged() -> None:
    sent = [
        line
        for line in step_of().steady
        if line.op.removesuffix("-start") in ("all-reduce", "all-gather", "all-to-all")
        and line.group_size == PLACES
        and math.prod(line.dims) >= TOKENS * DIM
    ]
    assert {line.op.removesuffix("-start") for line in sent} == {"all-reduce"}
    assert sum(line.num_operands for line in sent) == 2 * BLOCKS // STAGES


def test_products_are_of_slots_not_of_all_tokens() -> None:
    lines = [line for lines in step_of().program.computations.values() for line in lines]
    wide = {dims[:-1] for line in lines for dims in line.all_dims if dims[-1:] == (HIDDEN,)}
    assert any(dims[-2:] == (NUM_EXPERTS // PLACES, ROOM) for dims in wide)
    assert not any(TOKENS in dims for dims in wide)
