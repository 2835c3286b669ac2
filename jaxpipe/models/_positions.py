"""Positions of tokens, of packed texts too."""

import jax
import jax.numpy as jnp


def positions_of(length: int, segment_ids: jax.Array | None) -> jax.Array:
    """Positions of a sequence's T tokens, `[B or 1, T]`, in each of its texts from 0.

    `segment_ids` are integers `[B, T]`, equal for the tokens of one text; None: all are one text.
    """
    index = jnp.arange(length)[None]
    if segment_ids is None:
        return index
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.concatenate([jnp.zeros_like(changes, shape=(len(segment_ids), 1)), changes], 1)
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
