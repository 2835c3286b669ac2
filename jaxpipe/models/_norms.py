"""Norms that Flax does not have."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


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
