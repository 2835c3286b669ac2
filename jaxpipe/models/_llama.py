"""One decoder for Llama 2 and 3, Mistral, Mixtral, Phi-3, SmolLM, Qwen 2, 2.5 and 3 and Qwen's MoE.

Inside a stage, heads and features are divided over a mesh axis `model`. Projections from the
residual stream are divided by columns and projections back to it by rows, with one sum over the
axis after attention and one after the feed-forward network. Without such an axis nothing is
divided.
"""

from typing import Any, cast

import flax.linen as nn
import jax

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, TiedLayerSpec
from jaxpipe.recompute import reduced
from jaxpipe.transformer import (
    MODEL,
    Axes,
    Divided,
    attention,
    constrained,
    dividing_axes,
    stream_axes,
)
from jaxpipe.weights import Rename, Source, transpose

from ._experts import Experts
from ._experts_config import ExpertsConfig
from ._llama_config import LlamaConfig
from ._positions import positions_of
from ._rotary import rotary, rotate


class LlamaBlock(nn.Module):
    """A decoder block, which maps `[B, T, H]` to the same shape.

    It consists of attention and a feed-forward network, each with a norm before it and a residual
    connection.

    Args:
        config: The configuration.
        window: Number of positions that a query sees, including its own. None means all earlier
            positions.
        is_mixture: Whether its feed-forward network is the mixture `config.experts`.
    """

    config: LlamaConfig
    window: int | None = None
    is_mixture: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Run the block.

        Args:
            x: `[B, T, H]`.
            positions: Integers `[B, T]` for the rotary embedding. None means 0 to T - 1, starting
                from 0 in each segment. In a pipeline this is a side input of the same name.
            segment_ids: Integers `[B, T]`. Positions see only positions of the same segment, so
                that several texts can be packed into one sequence. In a pipeline this is a side
                input of the same name.
            train: Whether dropout is on.

        Returns:
            `[B, T, H]`.

        Raises:
            LayerError: There are segments, but the rotary angles depend on the length of a text.
        """
        config = self.config
        attend = LlamaAttention(config, self.window, name="attention")
        x = x + self._added(
            attend(_norm(config, "attention_norm")(x), positions, segment_ids, train=train)
        )
        h = _norm(config, "feed_forward_norm")(x)
        mixture = LlamaMixture if self.is_mixture else LlamaFeedForward
        x = x + self._added(mixture(config, name="feed_forward")(h))
        samples, length = self._axes(x)
        return x if length is None else constrained(x, samples, length)

    def _added(self, y: jax.Array) -> jax.Array:
        """Sum the results of row-divided projections over `model`, and name the sum.

        With the name, recompute can keep the sum instead of repeating it. The result is constrained
        to be undivided over `model` first: if it were only constrained along the positions, XLA
        would gather the gradient of the product twice.
        """
        y = constrained(y, *stream_axes(y.shape[0], y.shape[1]))
        return reduced(constrained(y, *self._axes(y)) if self.config.shard_sequence else y)

    def _axes(self, x: jax.Array) -> tuple[Axes, Axes]:
        return stream_axes(
            x.shape[0], x.shape[1], also=MODEL if self.config.shard_sequence else None
        )


class LlamaAttention(nn.Module):
    """Causal attention of N query heads to K key heads, with rotary positions.

    A query sees `window` positions; with None it sees all earlier positions.
    """

    config: LlamaConfig
    window: int | None = None

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
        batch, length, _ = x.shape

        def heads(name: str, num_heads: int) -> jax.Array:
            y = _columns(config, num_heads * config.head_dim, name, use_bias=config.qkv_bias)(x)
            samples, positions = stream_axes(batch, length)
            _, over = dividing_axes(batch, num_heads)
            return constrained(
                y.reshape(batch, length, num_heads, config.head_dim), samples, positions, over
            )

        q = heads("query", config.num_attention_heads)
        k, v = (heads(name, config.num_key_value_heads) for name in ("key", "value"))
        if config.qk_norm:
            q, k = _norm(config, "query_norm")(q), _norm(config, "key_norm")(k)
        scaling = config.rope_scaling
        if segment_ids is not None and scaling is not None and scaling.is_stretched(length):
            raise LayerError(
                "packed texts together must not be longer than the context at which "
                "rope_type='dynamic' begins to stretch, because the angles of a text depend on its "
                "own length, but got "
                f"segment_ids for {length} positions and "
                f"original_max_position_embeddings={scaling.original_max_position_embeddings}. "
                "Pack fewer texts."
            )
        positions = positions_of(length, segment_ids) if positions is None else positions
        cos, sin = rotary(positions, config.head_dim, config.rope_theta, scaling)
        drops = train and config.attention_dropout > 0 and not self.is_initializing()
        y = attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            causal=True,
            window=self.window,
            segment_ids=segment_ids,
            dropout_rate=config.attention_dropout if drops else 0.0,
            key=self.make_rng("dropout") if drops else None,
            sequence=config.sequence,
        )
        return _rows(config, "out", use_bias=config.out_bias)(y.reshape(batch, length, -1))


class LlamaFeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`.

    Its width is `size`, or `config.intermediate_size` with None.
    """

    config: LlamaConfig
    size: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape."""
        config, size = self.config, self.size or self.config.intermediate_size
        samples, positions = stream_axes(x.shape[0], x.shape[1])
        _, features = dividing_axes(x.shape[0], size)

        def wide(name: str) -> jax.Array:
            y = _columns(config, size, name, use_bias=config.mlp_bias)(x)
            return constrained(y, samples, positions, features)

        return _rows(config, "down", use_bias=config.mlp_bias)(nn.silu(wide("gate")) * wide("up"))


class LlamaMixture(nn.Module):
    """A mixture of experts, plus a shared expert for all tokens if the configuration has one."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape."""
        config, experts = self.config, cast(ExpertsConfig, self.config.experts)
        y = Experts(experts, config.initializer_range, config.dtype, name="experts")(x)
        if experts.shared_size:
            shared = LlamaFeedForward(config, experts.shared_size, name="shared")(x)
            if experts.shared_gate:
                gate = _dense(config, 1, (None, None), "shared_gate", use_bias=False)(x)
                shared = nn.sigmoid(gate) * shared
            y = y + shared
        return y


def llama(config: LlamaConfig) -> list[LayerSpec]:
    """Make the layers of the decoder for `PipelineModule`: tokens `[B, T]` to logits `[B, T, V]`.

    The first layer is an `nn.Embed`, and the last is an `nn.Dense`, or the same embedding if it is
    tied. With `pipeline.split_vocabulary` each stage holds a part of them. Blocks use the side
    inputs `positions` and `segment_ids` if the batch has them.

    Args:
        config: The configuration.

    Returns:
        The embedding, `num_hidden_layers` blocks, the norm and the head.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe
        >>> from jaxpipe.models import LlamaConfig, llama
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        >>> config = LlamaConfig(**sizes, num_attention_heads=4)
        >>> model = jaxpipe.PipelineModule(llama(config), num_stages=1)
        >>> tokens = jnp.zeros((1, 5), int)
        >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
        (1, 5, 64)

    Reference:
        Touvron et al., "LLaMA" (2023), and `LlamaForCausalLM` of Hugging Face's `transformers`.
    """
    normal = nn.initializers.normal(config.initializer_range)
    table: dict[str, Any] = {
        "num_embeddings": config.vocab_size,
        "features": config.hidden_size,
        "dtype": config.dtype,
        "embedding_init": Divided(normal, (MODEL, None), is_vocabulary=True),
    }
    layers = range(config.num_hidden_layers)
    blocks = [LayerSpec(LlamaBlock, config, config.window(i), config.is_mixture(i)) for i in layers]
    norm = LayerSpec(nn.RMSNorm, config.rms_norm_eps, dtype=config.dtype)
    if config.tie_word_embeddings:
        first = TiedLayerSpec("embedding", nn.Embed, **table)
        return [
            first,
            *blocks,
            norm,
            TiedLayerSpec("embedding", nn.Embed, **table, forward_fn=nn.Embed.attend),
        ]
    kernel_init = Divided(normal, (None, MODEL), is_vocabulary=True)
    head = LayerSpec(
        nn.Dense, config.vocab_size, use_bias=False, dtype=config.dtype, kernel_init=kernel_init
    )
    return [LayerSpec(nn.Embed, **table), *blocks, norm, head]


def llama_names(config: LlamaConfig | Source) -> tuple[Rename, ...]:
    """Make the table of Hugging Face's names for the weights of `llama(config)`.

    Args:
        config: The configuration, or a source for `from_huggingface`.

    Returns:
        A table for `jaxpipe.weights.rename` and similar functions.
    """
    if not isinstance(config, LlamaConfig):
        config = LlamaConfig.from_huggingface(config)
    table, head, last = "model.embed_tokens.weight", "lm_head.weight", config.num_hidden_layers + 1
    ends = (Rename(table, "0/embedding"), Rename(head, f"{last + 1}/kernel", transpose))
    return (
        *(
            (Rename((table, head), "tied/embedding/embedding"),)
            if config.tie_word_embeddings
            else ends
        ),
        *config.names,
        Rename("model.norm.weight", f"{last}/scale"),
        # A constant in old files.
        Rename("model.layers.{i}.self_attn.rotary_emb.inv_freq", None),
    )


def _norm(config: LlamaConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(config.rms_norm_eps, dtype=config.dtype, name=name)


def _columns(config: LlamaConfig, features: int, name: str, *, use_bias: bool) -> nn.Dense:
    """A dense layer whose output features are divided over `model`."""
    return _dense(config, features, (None, MODEL), name, use_bias=use_bias)


def _rows(config: LlamaConfig, name: str, *, use_bias: bool) -> nn.Dense:
    """A dense layer to the residual stream whose input features are divided over `model`."""
    return _dense(config, config.hidden_size, (MODEL, None), name, use_bias=use_bias)


def _dense(
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
