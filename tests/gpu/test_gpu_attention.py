"""Transformer layers on H200s.

CuDNN's attention is called, once a layer where it is kept, and no scores are held.
"""

import functools
import importlib.util
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _h200 import build, compile_step, h200_mesh
from _hlo import Program

from jaxpipe import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, LayerSpec, PipelineModule

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
takes_masks = jax.__version_info__ >= (0, 11, 1)
needs_masks = pytest.mark.skipif(
    not takes_masks, reason="before JAX 0.11.1 the kernel computes a mask's gradient"
)
SAMPLES, TIME, DIM, HEADS, STAGES, LAYERS_OF_A_STAGE = 4, 320, 128, 2, 2, 2


@functools.cache
def has_cudnn() -> bool:
    q = jax.ShapeDtypeStruct((1, 8, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(
            functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q
        )
    except RuntimeError:
        return False
    return True


@functools.cache
def step_of(model: int = 1, schedule: str = "1f1b", side: str = "", **given: Any) -> Any:
    config = DeepSpeedTransformerConfig(
        hidden_size=DIM,
        heads=HEADS,
        num_hidden_layers=STAGES * LAYERS_OF_A_STAGE,
        causal=not side,
        **given,
    )
    module = PipelineModule(
        [LayerSpec(DeepSpeedTransformerLayer, config) for _ in range(STAGES * LAYERS_OF_A_STAGE)],
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
    )
    x = jax.ShapeDtypeStruct((SAMPLES, TIME, DIM), jnp.float32)
    sides = {
        "lengths": jax.ShapeDtypeStruct((SAMPLES,), jnp.int32),
        "segment_ids": jax.ShapeDtypeStruct((SAMPLES, TIME), jnp.int32),
        "attention_mask": jax.ShapeDtypeStruct((SAMPLES, TIME), jnp.bool_),
    }
    example = (x, x, {side: sides[side]}) if side else (x, x)
    pipeline = build(module, h200_mesh(STAGES, 1, model=model), example, schedule=schedule)
    return pipeline, Program(compile_step(pipeline).as_text())


def kernels(program: Program) -> list[tuple[int, int]]:
    """Forward and backward calls of cuDNN's attention in each loop."""

    def count(body: Any, name: str) -> int:
        target = re.compile(rf'custom_call_target="__cudnn\$fmha(ScaleBias)?{name}"')
        return sum(target.search(line.rest) is not None for line in body)

    return [(count(body, "Softmax"), count(body, "SoftmaxBackward")) for body in program.bodies()]


def most_scores(program: Program) -> int:
    """The most arrays of a number a query and key that are in one array.

    Such as one a sample and head.
    """
    arrays = [
        array.dims
        for body in program.computations.values()
        for line in body.values()
        for array in line.arrays
    ]
    return max((math.prod(dims[:-2]) for dims in arrays if dims[-2:] == (TIME, TIME)), default=0)


@pytest.mark.parametrize(
    ("model", "side", "given", "forward"),
    [
        (1, "", {}, 1),
        (1, "", {"recompute": "kernels"}, 1),
        (1, "", {"recompute": "all"}, 2),
        (2, "", {"recompute": "kernels"}, 1),
        (1, "lengths", {}, 1),
        pytest.param(1, "attention_mask", {}, 1, marks=needs_masks),
        pytest.param(1, "segment_ids", {}, 1, marks=needs_masks),
        pytest.param(2, "segment_ids", {"recompute": "kernels"}, 1, marks=needs_masks),
    ],
)
def test_kernels_of_a_tick(model: int, side: str, given: dict[str, Any], forward: int) -> None:
    if not has_cudnn():
        pytest.skip("needs cuDNN: pip install nvidia-cudnn-cu13, its lib folder in LD_LIBRARY_PATH")
    _, program = step_of(model, side=side, **given)
    steady = max(kernels(program))
    assert steady == (forward * LAYERS_OF_A_STAGE, LAYERS_OF_A_STAGE)
    hides_pairs = side in ("attention_mask", "segment_ids")
    assert most_scores(program) <= (SAMPLES if hides_pairs else 0)


@pytest.mark.parametrize(
    ("side", "given"),
    [
        pytest.param(
            "attention_mask",
            {},
            marks=pytest.mark.skipif(takes_masks, reason="the kernel takes it"),
        ),
        ("", {"attn_dropout_ratio": 0.1}),
    ],
)
def test_in_blocks_no_scores_are_held_either(side: str, given: dict[str, Any]) -> None:
    _, program = step_of(side=side, **given)
    assert set(kernels(program)) == {(0, 0)}
    assert most_scores(program) == 0
