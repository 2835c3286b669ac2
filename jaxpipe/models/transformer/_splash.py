"""Attention with the Pallas kernels that JAX ships for TPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from jaxpipe.layers.recompute import KERNEL
from jaxpipe.programs.jaxpr import ATTENTION_SCOPE

from ._blocked import Pattern, Visibility

_LANES = 128
"""Number of positions that a TPU's vector units process at a time."""

_BLOCKS = (512, 256, _LANES)
"""Candidate numbers of positions in a block, the best first."""


def splash_refusal(
    pattern: Pattern, q: jax.Array, k: jax.Array, visibility: Visibility
) -> str | None:
    """Return why the kernels cannot compute this; None if they can."""
    same = visibility.query_segments is visibility.key_segments
    found = {
        f"the dtype is {q.dtype}, and its kernels take bfloat16 and float32": q.dtype
        not in (jnp.bfloat16, jnp.float32),
        f"there are {q.shape[1]} queries and {k.shape[1]} keys, and its kernels take multiples of "
        f"{_LANES}": bool(q.shape[1] % _LANES or k.shape[1] % _LANES),
        "probabilities are dropped": pattern.dropout_rate > 0,
        "there is a mask": visibility.mask is not None,
        "there are lengths": visibility.lengths is not None,
        "queries have other segment_ids than keys": not same,
        "there are more queries than keys": q.shape[1] > k.shape[1],
    }
    return next((why for why, holds in found.items() if holds), None)


@jax.named_scope(ATTENTION_SCOPE)
def splash_attention(
    pattern: Pattern,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention, `[B, T, N, Dv]`, of q, k, v and sinks in the form of `Operands`.

    `segments` are `[B, T]`, for queries and keys. `interpret` runs on any platform, slowly.
    """
    kernel = _kernel(pattern, q.shape[2], q.shape[1], k.shape[1], interpret=interpret)
    # The kernels have heads before positions, and do not scale scores.
    queries, keys, values = (x.swapaxes(1, 2) for x in (q * pattern.scale, k, v))
    ids = None if segments is None else splash_attention_kernel.SegmentIds(segments, segments)
    call = functools.partial(kernel, sinks=sinks)
    out: Any = jax.vmap(call)(queries.astype(q.dtype), keys, values, ids)
    return out.swapaxes(1, 2)


def _kernel(
    pattern: Pattern, heads: int, num_queries: int, num_keys: int, *, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    shape = num_queries, num_keys
    if pattern.window is not None:
        later = 0 if pattern.causal else pattern.window - 1
        mask = splash_attention_mask.LocalMask(shape, (pattern.window - 1, later), offset=0)
    elif pattern.causal:
        mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.FullMask(shape)
    # `splash_refusal` has checked that the smallest block divides both.
    of_queries, of_keys = (next(block for block in _BLOCKS if not size % block) for size in shape)
    blocks = splash_attention_kernel.BlockSizes(
        block_q=of_queries,
        block_kv=of_keys,
        block_kv_compute=of_keys,
        block_q_dkv=of_queries,
        block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys,
        block_q_dq=of_queries,
        block_kv_dq=of_keys,
    )
    make = functools.partial(
        splash_attention_kernel.make_splash_mha_single_device,
        block_sizes=blocks,
        # Named so that a policy can keep it; recompute then does not run this again.
        residual_checkpoint_name=KERNEL,
        attn_logits_soft_cap=pattern.soft_cap,
        interpret=interpret,
    )
    # Outside of any trace, because the results must be constants.
    with jax.ensure_compile_time_eval():
        return make(splash_attention_mask.MultiHeadMask([mask] * heads))
