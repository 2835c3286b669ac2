"""The transformer layer in thirty lines, all scores at once, dropout as given."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe import DeepSpeedTransformerConfig


class Key(nn.Module):
    """The key of a layer that is given the same keys."""

    @nn.compact
    def __call__(self) -> jax.Array:
        return self.make_rng("dropout")


def dropout_of(
    key: jax.Array | None, seed: int = -1
) -> Callable[[int, jax.Array, float], jax.Array]:
    """Dropout in the places of a layer: 0 of probabilities, 1 and 2 of outputs."""
    if key is None:
        return lambda place, x, rate: x
    own = Key().apply({}, rngs={"dropout": key})
    own = own if seed < 0 else jax.random.fold_in(own, seed)

    def drop(place: int, x: jax.Array, rate: float) -> jax.Array:
        here = jax.random.fold_in(own, place)
        # Probabilities are dropped block by block; here is one block, and all heads of keys have
        # one of queries.
        shape = x.shape if place else (*x.shape[:2], 1, *x.shape[2:])
        here = here if place else jax.random.fold_in(here, 0)
        return jnp.where(
            jax.random.bernoulli(here, 1 - rate, shape).reshape(x.shape), x / (1 - rate), 0.0
        )

    return drop


def layer(
    config: DeepSpeedTransformerConfig,
    w: Any,
    x: jax.Array,
    seen: Any = True,
    added: Any = 0.0,
    drop: Any = None,
) -> jax.Array:
    """`seen` and `added` are for `[B, N, T, T]` scores."""
    drop = drop or dropout_of(None)

    def norm(x: jax.Array, name: str) -> jax.Array:
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(
            x.var(-1, keepdims=True) + config.layer_norm_eps
        )
        return x * w[f"{name}w"][None, None] + w[f"{name}b"][None, None]

    def attend(x: jax.Array) -> jax.Array:
        q, k, v = (
            jnp.einsum("bth,hcnd->cbntd", x, w["attn_qkvw"]) + w["attn_qkvb"][:, None, :, None]
        )
        scores = jnp.einsum("bntd,bnsd->bnts", q, k) / q.shape[-1] ** 0.5 + added
        scores = jnp.where(seen, scores, -1e30)
        if config.causal:
            scores = jnp.where(
                jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None], scores, -1e30
            )
        weights = drop(0, jax.nn.softmax(scores), config.attn_dropout_ratio)
        return jnp.einsum("bnts,bnsd,ndh->bth", weights, v, w["attn_ow"]) + w["attn_ob"][None, None]

    def feed_forward(x: jax.Array) -> jax.Array:
        h = config.activation(x @ w["inter_w"] + w["inter_b"][None, None])
        return h @ w["output_w"] + w["output_b"][None, None]

    if config.pre_layer_norm:
        x = x + drop(1, attend(norm(x, "norm_")), config.hidden_dropout_ratio)
        return x + drop(2, feed_forward(norm(x, "attn_n")), config.hidden_dropout_ratio)
    x = norm(x + drop(1, attend(x), config.hidden_dropout_ratio), "attn_n")
    return norm(x + drop(2, feed_forward(x), config.hidden_dropout_ratio), "norm_")
