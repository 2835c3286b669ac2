"""Multi-head latent attention, as in DeepSeek V2 and V3."""

import math
from dataclasses import replace
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.transformer import (
    MODEL,
    Divided,
    attention,
    constrained,
    dividing_axes,
    stream_axes,
)

from ._latent_config import LatentConfig
from ._llama_config import BlockKind, LlamaConfig
from ._positions import positions_of
from ._rotary import RotaryScaling, check_packed

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms, which no key of `config.json` sets."""


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent vector of each token.

    Heads are divided over `model`. The latents and the rotary key, which all heads share, are whole
    on each device of the axis.
    """

    config: LlamaConfig
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
        sizes = cast(LatentConfig, self.config.latent)
        batch, length, _ = x.shape
        stream = stream_axes(batch, length)
        _, over = dividing_axes(batch, config.num_attention_heads)

        def down(name: str, size: int) -> jax.Array:
            return constrained(self._dense(name, size, use_bias=config.qkv_bias)(x), *stream)

        def norm(name: str, y: jax.Array) -> jax.Array:
            return nn.RMSNorm(_NORM_EPS, dtype=config.dtype, name=name)(y)

        def heads(name: str, size: int, y: jax.Array) -> jax.Array:
            dense = self._dense(name, config.num_attention_heads * size, (None, MODEL))
            shape = batch, length, config.num_attention_heads, size
            return constrained(dense(y).reshape(shape), *stream, over)

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
            check_packed(self.kind.rotary.scaling, length, segment_ids)
            if positions is None:
                positions = positions_of(length, segment_ids)
            turn = replace(self.kind.rotary, interleave=sizes.rope_interleave)
            of_query, of_key = turn(positions, of_query, of_key)
        of_key = jnp.broadcast_to(of_key, (*q.shape[:3], turned)).astype(kv.dtype)
        drops = train and config.attention_dropout > 0 and not self.is_initializing()
        q = jnp.concatenate([q, of_query], axis=-1)
        k = jnp.concatenate([kv[..., :plain], of_key], axis=-1)
        y = attention(
            *(constrained(each, *stream, over) for each in (q, k, kv[..., plain:])),
            causal=True,
            window=self.kind.window,
            segment_ids=segment_ids,
            dropout_rate=config.attention_dropout if drops else 0.0,
            key=self.make_rng("dropout") if drops else None,
            sequence=config.sequence,
            scale=sizes.head_dim**-0.5 * _sharpness(config.rope_scaling),
        )
        out = self._dense("out", config.hidden_size, (MODEL, None), use_bias=config.out_bias)
        return out(y.reshape(batch, length, -1))

    def _dense(
        self,
        name: str,
        features: int,
        axes: tuple[str | None, str | None] = (None, None),
        *,
        use_bias: bool = False,
    ) -> nn.Dense:
        normal = nn.initializers.normal(self.config.initializer_range)
        return nn.Dense(
            features,
            use_bias,
            self.config.dtype,
            kernel_init=Divided(normal, axes),
            bias_init=Divided(nn.initializers.zeros, axes[1:]),
            name=name,
        )


def _sharpness(scaling: RotaryScaling | None) -> float:
    """The factor of the scores that `mscale_all_dim` sets, for all dims of a head."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    # Cosine and sine, which are multiplied only with the rotated dims, are divided by its root.
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
