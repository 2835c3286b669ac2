"""Dense layers, norms and scores of the Llama decoder."""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.models.transformer import MODEL, Divided, attention

from ._llama_config import LlamaConfig


class ZeroCenteredRMSNorm(nn.Module):
    """The norm of Gemma: `x / rms(x) * (1 + scale)`, computed in float32 or wider."""

    epsilon: float = 1e-6
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dim."""
        # Centred at 0, so that weight decay pulls the factors to 1.
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        dtype = jnp.result_type(x, scale) if self.dtype is None else self.dtype
        wide = np.promote_types(dtype, np.float32)
        y = x.astype(wide)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * (1 + scale.astype(wide).reshape((1,) * (x.ndim - 1) + (-1,)))).astype(dtype)


def norm(config: LlamaConfig, name: str) -> nn.Module:
    return norm_class(config)(config.norms.rms_norm_eps, dtype=config.dtype, name=name)


def norm_class(config: LlamaConfig) -> type[nn.RMSNorm] | type[ZeroCenteredRMSNorm]:
    return ZeroCenteredRMSNorm if config.norms.zero_centered_norms else nn.RMSNorm


def columns(config: LlamaConfig, features: int, name: str, *, use_bias: bool) -> nn.Dense:
    """A dense layer whose output features are divided over `model`."""
    return dense(config, features, (None, MODEL), name, use_bias=use_bias)


def rows(config: LlamaConfig, name: str, *, use_bias: bool) -> nn.Dense:
    """A dense layer to the residual stream whose input features are divided over `model`."""
    return dense(config, config.hidden_size, (MODEL, None), name, use_bias=use_bias)


def dense(
    config: LlamaConfig,
    features: int,
    axes: tuple[str | None, str | None],
    name: str,
    *,
    use_bias: bool,
) -> nn.Dense:
    return nn.Dense(
        features,
        use_bias,
        config.dtype,
        kernel_init=Divided(nn.initializers.normal(config.initializer_range), axes),
        bias_init=Divided(nn.initializers.zeros, axes[1:]),
        name=name,
    )


def attend(
    module: Any,
    qkv: Iterable[jax.Array],
    segment_ids: jax.Array | None,
    *,
    train: bool,
    **scores: Any,
) -> jax.Array:
    """Run the causal attention of a module with a `config` and a `kind`."""
    config: LlamaConfig = module.config
    drops = train and config.attention_dropout > 0 and not module.is_initializing()
    return attention(
        *qkv,
        causal=True,
        window=module.kind.window,
        segment_ids=segment_ids,
        dropout_rate=config.attention_dropout if drops else 0.0,
        key=module.make_rng("dropout") if drops else None,
        sequence=config.sequence,
        **scores,
    )
