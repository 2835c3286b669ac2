"""Multi-head latent attention, as in DeepSeek V2 and V3."""

import math
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.models.transformer import (
    constrained,
    dividing_axes,
    stream_axes,
)

from ._dense import attend, columns, dense, rows
from ._latent_config import LatentConfig
from ._llama_config import LlamaConfig
from ._parts import BlockKind
from ._positions import positions_of
from ._rotary import RotaryScaling

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, which no key of `config.json` sets."""


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent vector of each token.

    Heads are divided over `model`. The latents and the rotary key, which all heads share, are whole
    on each device of the axis.
    """

    config: LlamaConfig
    sizes: LatentConfig
    kind: BlockKind

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        *,
        train: bool,
    ) -> jax.Array:
        """Map `[B, T, H]` to the same shape; see `LlamaBlock`."""
        config = self.config
        sizes = self.sizes
        batch, length, _ = x.shape
        stream = stream_axes(batch, length)
        _, over = dividing_axes(batch, config.num_attention_heads)

        def down(name: str, size: int) -> jax.Array:
            return constrained(
                dense(config, size, (None, None), name, use_bias=config.qkv_bias)(x), *stream
            )

        def norm(name: str, y: jax.Array) -> jax.Array:
            return nn.RMSNorm(_NORM_EPS, dtype=config.dtype, name=name)(y)

        def heads(name: str, size: int, y: jax.Array) -> jax.Array:
            up = columns(config, config.num_attention_heads * size, name, use_bias=False)
            shape = batch, length, config.num_attention_heads, size
            return constrained(up(y).reshape(shape), *stream, over)

        rank = sizes.kv_lora_rank
        plain = sizes.qk_nope_head_dim
        turned = sizes.qk_rope_head_dim
        if sizes.q_lora_rank is None:
            q = heads("query", sizes.head_dim, x)
        else:
            latent = norm("query_norm", down("query_down", sizes.q_lora_rank))
            q = heads("query_up", sizes.head_dim, latent)
        # One product for the latent and the shared rotary key, as in the files.
        both = down("key_value_down", rank + turned)
        # The norm is for the latent alone: the rotary key is used as it is.
        latent = norm("key_value_norm", both[..., :rank])
        kv = heads("key_value_up", plain + sizes.v_head_dim, latent)
        q, of_query = q[..., :plain], q[..., plain:]
        of_key = both[:, :, None, rank:]
        if self.kind.rotary is not None:
            if positions is None:
                positions = positions_of(length, segment_ids)
            turn = replace(self.kind.rotary, rope_interleave=sizes.rope_interleave)
            of_query, of_key = turn(positions, segment_ids, of_query, of_key)
        of_key = jnp.broadcast_to(of_key, (*q.shape[:3], turned)).astype(kv.dtype)
        q = jnp.concatenate([q, of_query], axis=-1)
        k = jnp.concatenate([kv[..., :plain], of_key], axis=-1)
        y = attend(
            self,
            [constrained(each, *stream, over) for each in (q, k, kv[..., plain:])],
            segment_ids,
            train=train,
            scale=sizes.head_dim**-0.5 * _sharpness(config.rotary.rope_scaling),
        )
        return rows(config, "out", use_bias=config.out_bias)(y.reshape(batch, length, -1))


def _sharpness(scaling: RotaryScaling | None) -> float:
    """The factor of the scores that `mscale_all_dim` sets, for all dims of a head."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    # Cosine and sine, which are multiplied only with the rotated dims, are divided by its root.
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
