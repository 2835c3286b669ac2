"""The step of blocks with experts without a capacity, on H200s: what it computes and sends."""

import functools
import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from _h200 import Step, build, h200_mesh
from _hlo import dims_of

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.models import ExpertsConfig, LlamaBlock, LlamaConfig

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
DIM, HIDDEN, TIME, SAMPLES, STAGES, PLACES, BLOCKS = 512, 768, 256, 8, 2, 2, 4
HEADS, NUM_EXPERTS, CHOICES = 4, 8, 2
TOKENS = SAMPLES * TIME // PLACES
ROOM = TOKENS * CHOICES * 5 // 4 // NUM_EXPERTS


@functools.cache
def step_of() -> Step:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=DIM,
        intermediate_size=HIDDEN,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        experts=ExpertsConfig(NUM_EXPERTS, CHOICES, HIDDEN),
    )
    module = PipelineModule(
        [LayerSpec(LlamaBlock, config, config.kind(0)) for _ in range(BLOCKS)],
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
    )
    x = jax.ShapeDtypeStruct((SAMPLES, TIME, DIM), jnp.float32)
    return Step.of(build(module, h200_mesh(STAGES, 1, expert=PLACES), (x, x), 8))


def test_each_token_is_sent_to_its_experts_and_back_once_in_each_direction() -> None:
    sent = [
        (line.op.removesuffix("-start"), dims_of(line))
        for line in step_of().steady
        if line.op.removesuffix("-start") in ("all-reduce", "all-to-all")
        and len(line.group) == PLACES
        and dims_of(line)[-1:] == (DIM,)
        and math.prod(dims_of(line)) >= TOKENS * DIM
    ]
    slots = PLACES, NUM_EXPERTS // PLACES, ROOM, DIM
    assert sent == [("all-to-all", slots)] * (4 * BLOCKS // STAGES)


def test_products_are_of_slots_not_of_all_tokens() -> None:
    wide = {dims[:-1] for dims in all_dims() if dims[-1:] == (HIDDEN,)}
    assert any(dims[-2:] == (NUM_EXPERTS // PLACES, PLACES * ROOM) for dims in wide)
    assert not any(TOKENS in dims for dims in wide)


def test_attention_and_the_stream_are_divided_by_samples() -> None:
    heads = {dims for dims in all_dims() if {HEADS, TIME, DIM // HEADS} <= set(dims)}
    assert any(dims[0] == SAMPLES // PLACES for dims in heads)
    assert not any(SAMPLES in dims for dims in heads)


def all_dims() -> set[tuple[int, ...]]:
    lines = [line for lines in step_of().program.computations.values() for line in lines.values()]
    return {each.dims for line in lines for each in line.arrays}
