"""Positions of packed texts."""

import jax
import jax.numpy as jnp


def positions_of(segment_ids: jax.Array) -> jax.Array:
    """Positions within each segment of `[B, T]`, from 0 where the number of a segment changes."""
    index = jnp.arange(segment_ids.shape[1])[None]
    begins = jnp.concatenate([jnp.zeros_like(segment_ids[:, :1], bool), segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
