"""Kernels of traced programs: operations of products, bytes that move, and what is fused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.models.transformer._blocked import BLOCK
from jaxpipe.programs.jaxpr import count_kernels, num_flops
from jaxpipe.transformer import attention


def _conv(x: jax.Array, k: jax.Array, groups: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=groups)


@pytest.mark.parametrize(
    ("function", "shapes", "flops", "num_bytes"),
    [
        (lambda x, w: x @ w, [(4, 8), (8, 2)], 2 * 4 * 8 * 2, 4 * (32 + 16 + 8)),
        (lambda x, w: jnp.tanh(x @ w), [(4, 8), (8, 2)], 2 * 4 * 8 * 2, 4 * (32 + 16 + 8 + 8 + 8)),
        (
            lambda x, w: jnp.tanh(x) @ w,
            [(4, 8), (8, 2)],
            2 * 4 * 8 * 2,
            4 * (32 + 32 + 32 + 16 + 8),
        ),
        (
            lambda x, k: _conv(x, k, 1),
            [(1, 4, 5, 5), (6, 4, 3, 3)],
            2 * 54 * 36,
            4 * (100 + 216 + 54),
        ),
        (
            lambda x, k: _conv(x, k, 2),
            [(1, 4, 5, 5), (6, 2, 3, 3)],
            2 * 54 * 18,
            4 * (100 + 108 + 54),
        ),
        (lambda x: x.sum(0), [(4, 8)], 0, 4 * 40),
        (lambda x: (x * 2 + 1).sum(0), [(4, 8)], 0, 4 * 40),
        (lambda x: x[jnp.array([1, 3])], [(1000, 8)], 0, 2 * 4 * 16 + 2 * 4 * 2),
        (
            lambda x, p: jax.lax.cond(p > 0, lambda: x + 1.0, lambda: x),
            [(8,), ()],
            0,
            2 * 32 + 4 + 1,
        ),
        (lambda x: (x * 2.0, x + 1.0)[0], [(8,)], 0, 2 * 32),
        (
            lambda x, w: jax.lax.scan(lambda y, e: (y @ e, None), x, w)[0],
            [(4, 8), (5, 8, 8)],
            5 * 512,
            5 * 4 * 128,
        ),
    ],
    ids=[
        *(
            "product",
            "arithmetic after",
            "arithmetic before",
            "convolution",
            "groups",
            "sum",
            "sum of arithmetic",
        ),
        *("look-up", "branch", "unused", "scan"),
    ],
)
def test_kernels(function: Any, shapes: list[tuple[int, ...]], flops: int, num_bytes: int) -> None:
    kernels = count_kernels(
        function, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    assert num_flops(kernels) == flops
    assert sum(each.times * each.num_bytes for each in kernels) == num_bytes


@pytest.mark.parametrize(
    ("time", "seen"),
    [(128, 1), (2 * BLOCK, 3 / 4), (4 * BLOCK, 10 / 16)],
    ids=["one", "two", "four"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_leaves_blocks_out_of_attentions_square(
    time: int, seen: float, *, causal: bool
) -> None:
    def attend(q: jax.Array) -> jax.Array:
        return attention(q, q, q, causal=causal, implementation="blocked")

    shape = jax.ShapeDtypeStruct((2, time, 3, 64), jnp.bfloat16)
    (kernel,) = (x for x in count_kernels(attend, [shape]) if x.kind == "attention")
    square = 2 * 2 * (2 * 3) * time**2 * 64
    assert kernel.flops + kernel.masked_flops == square
    assert kernel.flops == (seen if causal else 1) * square


def test_attention_counts_values_of_another_size_and_sinks() -> None:
    def attend(q: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return attention(q, q, v, sinks=sinks, soft_cap=30.0)

    q, v = (jax.ShapeDtypeStruct((2, BLOCK, 3, size), jnp.bfloat16) for size in (192, 128))
    sinks = jax.ShapeDtypeStruct((3,), jnp.float32)
    (kernel,) = (x for x in count_kernels(attend, [q, v, sinks]) if x.kind == "attention")
    assert kernel.flops == 2 * (2 * 3) * BLOCK**2 * (192 + 128)
    pairs = 2 * 4  # the indices of one pair of blocks
    assert kernel.num_bytes == 2 * (2 * 3 * BLOCK) * (192 + 2 * 128) + 3 * 4 + pairs
