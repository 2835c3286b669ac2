"""Positions of tokens, also in packed texts."""

import jax
import jax.numpy as jnp

from jaxpipe.models.transformer import constrained, stream_axes


def positions_of(length: int, segment_ids: jax.Array | None) -> jax.Array:
    """Positions of tokens, `[B or 1, T]`, from 0 in each text of equal `segment_ids`, `[B, T]`."""
    index = jnp.arange(length)[None]
    if segment_ids is None:
        return index
    # Whole along the text: if XLA divided them, it would move slices to compare neighbours.
    samples, _ = stream_axes(len(segment_ids), length)
    segment_ids = constrained(segment_ids, samples)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.concatenate([jnp.zeros_like(changes, shape=(len(segment_ids), 1)), changes], 1)
    positions = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return constrained(positions, samples)


def chunks_of(
    positions: jax.Array, segment_ids: jax.Array | None, size: int, batch: int
) -> jax.Array:
    """Integers `[B, T]`, equal for tokens of the same chunk of `size` positions of a text."""
    positions = jnp.broadcast_to(positions, (batch, positions.shape[1]))
    begins = positions[:, 1:] // size != positions[:, :-1] // size
    if segment_ids is not None:
        begins |= segment_ids[:, 1:] != segment_ids[:, :-1]
    # Numbers of chunks only need to differ, so they count over texts.
    return jnp.pad(jnp.cumsum(begins, axis=1), ((0, 0), (1, 0)))
