"""The transformer that the benchmarks train: equal blocks between an embedding and a head."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe


class Embed(nn.Module):
    """Token and position embedding."""

    vocab: int
    dim: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map `[batch, time]` to `[batch, time, dim]`."""
        position = self.param(
            "position", nn.initializers.normal(0.02), (tokens.shape[-1], self.dim)
        )
        return nn.Embed(self.vocab, self.dim)(tokens) + position[None]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    dim: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        qkv = nn.Dense(3 * dim, use_bias=False)(nn.LayerNorm()(x))
        q, k, v = jnp.moveaxis(qkv.reshape(batch, time, 3, self.heads, dim // self.heads), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (dim // self.heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((time, time), bool))[None, None], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v).reshape(batch, time, dim)
        x = x + nn.Dense(dim, use_bias=False)(mixed)
        return x + nn.Dense(dim)(nn.gelu(nn.Dense(4 * dim)(nn.LayerNorm()(x))))


class Head(nn.Module):
    """Final norm and logits."""

    vocab: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to logits `[batch, time, vocab]`."""
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy in nats."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def gpt(
    num_stages: int,
    *,
    dim: int,
    num_blocks: int,
    vocab: int = 256,
    heads: int = 8,
    **settings: object,
) -> jaxpipe.PipelineModule:
    """The model, cut so that all stages hold equally many blocks."""
    layers = [
        jaxpipe.LayerSpec(Embed, vocab, dim),
        *[jaxpipe.LayerSpec(Block, dim, heads) for _ in range(num_blocks)],
        jaxpipe.LayerSpec(Head, vocab),
    ]
    return jaxpipe.PipelineModule(
        layers, num_stages, loss_fn=cross_entropy, partition_method="trunk", **settings
    )


def tokens(
    num_microbatches: int, batch: int, time: int, vocab: int = 256
) -> tuple[np.ndarray, np.ndarray, dict]:
    """A batch of random tokens, `[num_microbatches, batch, time]`."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, vocab, (2, num_microbatches, batch, time), dtype=np.int32)
    return x, y, {}
