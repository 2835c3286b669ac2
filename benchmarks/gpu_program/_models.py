"""The models that the jobs train.

Blocks as large language models have them, between an embedding and a head.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxpipe
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.transformer import attention

HEAD_DIM = 128
Dense = functools.partial(nn.Dense, use_bias=False)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map an array to the same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(
            x.dtype
        ) * scale


def rotary(x: jax.Array) -> jax.Array:
    """Rotate the halves of `[batch, time, heads, HEAD_DIM]` by their place in time."""
    frequency = 1e4 ** (-jnp.arange(HEAD_DIM // 2, dtype=jnp.float32) / (HEAD_DIM // 2))
    angle = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency)[None, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, implementation: Any) -> jax.Array:
    """Causal attention; cuDNN has none in float32, in which parameters are made.

    `implementation` is one of `jaxpipe.attention`, or a function of queries, keys and values.
    """
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    if callable(implementation):
        return implementation(*narrow).astype(q.dtype)
    return attention(*narrow, causal=True, implementation=implementation).astype(q.dtype)


class LlamaBlock(nn.Module):
    """A block with rotary embeddings, grouped queries and a gated feed-forward layer.

    Attributes:
        hidden: Width of the feed-forward layer.
        kv_heads: Heads of keys and values, of `HEAD_DIM` each.
        attention: Implementation of `jaxpipe.attention`.
    """

    hidden: int
    kv_heads: int
    attention: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        normed = RMSNorm()(x)
        q, k, v = (
            Dense(heads * HEAD_DIM)(normed).reshape(batch, time, heads, HEAD_DIM)
            for heads in (dim // HEAD_DIM, self.kv_heads, self.kv_heads)
        )
        mixed = attend(rotary(q), rotary(k), v, self.attention)
        x = x + Dense(dim)(mixed.reshape(batch, time, dim))
        normed = RMSNorm()(x)
        return x + Dense(dim)(nn.silu(Dense(self.hidden)(normed)) * Dense(self.hidden)(normed))


class TensorParallelBlock(nn.Module):
    """`LlamaBlock` with weights divided over the mesh axis `model`, by Flax's metadata."""

    hidden: int
    kv_heads: int
    attention: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        init = nn.initializers.lecun_normal()
        columns = functools.partial(Dense, kernel_init=nn.with_partitioning(init, (None, "model")))
        rows = functools.partial(Dense, kernel_init=nn.with_partitioning(init, ("model", None)))
        normed = RMSNorm()(x)
        q, k, v = (
            columns(heads * HEAD_DIM)(normed).reshape(batch, time, heads, HEAD_DIM)
            for heads in (dim // HEAD_DIM, self.kv_heads, self.kv_heads)
        )
        mixed = attend(rotary(q), rotary(k), v, self.attention)
        x = x + rows(dim)(mixed.reshape(batch, time, dim))
        normed = RMSNorm()(x)
        return x + rows(dim)(nn.silu(columns(self.hidden)(normed)) * columns(self.hidden)(normed))


class GPT2Block(nn.Module):
    """The block of GPT-2: layer norms, heads of 64, GELU, biases.

    Attributes:
        attention: Implementation of `jaxpipe.attention`.
    """

    attention: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        qkv = nn.Dense(3 * dim)(nn.LayerNorm()(x)).reshape(batch, time, 3, dim // 64, 64)
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = attend(q, k, v, self.attention)
        x = x + nn.Dense(dim)(mixed.reshape(batch, time, dim))
        return x + nn.Dense(dim)(nn.gelu(nn.Dense(4 * dim)(nn.LayerNorm()(x))))


class Embed(nn.Module):
    """Token embedding."""

    vocab: int
    dim: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map `[batch, time]` to `[batch, time, dim]`."""
        return nn.Embed(self.vocab, self.dim)(tokens)


class Head(nn.Module):
    """Final norm and logits."""

    vocab: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to logits `[batch, time, vocab]`."""
        return Dense(self.vocab)(RMSNorm()(x))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in nats, in float32."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def language_model(
    block: nn.Module,
    num_blocks: int,
    num_stages: int,
    *,
    vocab: int,
    dim: int,
    split_vocab: bool,
    interval: int,
) -> jaxpipe.PipelineModule:
    """Put blocks between an embedding and a head, computing in bfloat16.

    Args:
        block: The block.
        num_blocks: How many of them.
        num_stages: Stages, of equally many blocks each.
        vocab: Rows of the embedding.
        dim: Width of the residual stream.
        split_vocab: Whether embedding and head are divided over the stages.
        interval: Blocks of a recomputed group; 0: nothing is recomputed.
    """
    ends: list[Any] = [jaxpipe.LayerSpec(Embed, vocab, dim), jaxpipe.LayerSpec(Head, vocab)]
    loss_fn: Any = cross_entropy
    if split_vocab:
        ends = [VocabEmbed(vocab, dim), RMSNorm(), VocabHead(vocab, use_bias=False)]

        def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
            return vocab_cross_entropy(logits, labels, vocab).mean()

    return jaxpipe.PipelineModule(
        [ends[0], *(block.clone() for _ in range(num_blocks)), *ends[1:]],
        num_stages,
        loss_fn=loss_fn,
        partition_method="trunk",
        compute_dtype=jnp.bfloat16,
        activation_checkpoint_interval=interval,
    )
