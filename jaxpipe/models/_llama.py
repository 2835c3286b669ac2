"""One decoder for the families of `_families.py`, made of the parts that a configuration chooses.

Inside a stage, heads and features are divided over a mesh axis `model`. Projections from the
residual stream are divided by columns and projections back to it by rows, with one sum over the
axis after attention and one after the feed-forward network. Without such an axis nothing is
divided.
"""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.layers import LayerSpec, SoftCapped, TiedLayerSpec
from jaxpipe.layers.recompute import reduced
from jaxpipe.models.transformer import (
    MODEL,
    Axes,
    Divided,
    constrained,
    dividing_axes,
    stream_axes,
)
from jaxpipe.weights import Rename, Source, transpose

from ._activations import ACTIVATIONS
from ._dense import attend, columns, dense, norm, norm_class, rows
from ._experts import Experts
from ._experts_config import ExpertsConfig
from ._latent import LatentAttention
from ._latent_config import LatentConfig
from ._llama_config import LlamaConfig
from ._multi_token import (
    MultiToken,
    block_and_carry,
    embed_and_carry,
    multi_token_names,
    norm_and_carry,
    with_copies,
)
from ._parts import BlockKind, Heads
from ._positions import chunks_of, positions_of

_TABLE = "embedding"
"""Key of the tied table, and its name in the layers that use it."""


class LlamaBlock(nn.Module):
    """A decoder block, which maps `[B, T, H]` to the same shape.

    It consists of attention and a feed-forward network, each with a norm before it, perhaps one
    after it, and a residual connection.

    Args:
        config: The configuration.
        kind: What distinguishes it from other blocks, from `config.kind(layer)`.
    """

    config: LlamaConfig
    kind: BlockKind

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Run the block on `[B, T, H]`; `positions` and `segment_ids` are integers `[B, T]`.

        In a pipeline these are side inputs. Positions default to 0 to T - 1, from 0 in each
        segment. A token sees only tokens of its segment.
        """
        config = self.config
        part = self.kind.attention
        if isinstance(part, LatentConfig):
            attention = LatentAttention(config, part, self.kind, name="attention")
        else:
            attention = LlamaAttention(config, part, self.kind, name="attention")
        h = norm(config, "attention_norm")(x)
        y = self._added(attention(h, positions, segment_ids, train=train))
        x = x + (norm(config, "attention_post_norm")(y) if config.norms.post_norms else y)
        h = norm(config, "feed_forward_norm")(x)
        experts = self.kind.experts
        if experts is None:
            network = LlamaFeedForward(config, name="feed_forward")
        else:
            network = LlamaMixture(config, experts, name="feed_forward")
        y = self._added(network(h))
        x = x + (norm(config, "feed_forward_post_norm")(y) if config.norms.post_norms else y)
        # What leaves the block is pinned, because a pipeline stores it between actions.
        samples, length = self._axes(x)
        return x if length is None else constrained(x, samples, length)

    def _added(self, y: jax.Array) -> jax.Array:
        """Sum the results of row-divided projections over `model`, and name the sum."""
        # First undivided over `model`: if it were only constrained along the positions, XLA would
        # gather the gradient of the product twice. With the name, recompute can keep the sum.
        y = constrained(y, *stream_axes(y.shape[0], y.shape[1]))
        return reduced(constrained(y, *self._axes(y)) if self.config.shard_sequence else y)

    def _axes(self, x: jax.Array) -> tuple[Axes, Axes]:
        return stream_axes(
            x.shape[0], x.shape[1], also=MODEL if self.config.shard_sequence else None
        )


class LlamaAttention(nn.Module):
    """Causal attention of N query heads to K key heads, with rotary positions."""

    config: LlamaConfig
    part: Heads
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
        part = self.part
        batch, length, _ = x.shape

        def heads(name: str, num_heads: int) -> jax.Array:
            y = columns(config, num_heads * config.head_dim, name, use_bias=config.qkv_bias)(x)
            samples, positions = stream_axes(batch, length)
            # The axis may divide the heads of queries and not the fewer ones of keys.
            _, over = dividing_axes(batch, num_heads)
            return constrained(
                y.reshape(batch, length, num_heads, config.head_dim), samples, positions, over
            )

        q = heads("query", config.num_attention_heads)
        k, v = (heads(name, config.num_key_value_heads) for name in ("key", "value"))
        # Before the rotation: the norm's factors belong to dims, which positions mix.
        if part.qk_norm:
            q = norm(config, "query_norm")(q)
            k = norm(config, "key_norm")(k)
        # Positions of the caller may begin in the middle of a chunk.
        may_cross = self.kind.chunk is not None and (
            positions is not None or length > self.kind.chunk
        )
        if positions is None:
            positions = positions_of(length, segment_ids)
        q, k = self._placed(positions, segment_ids, q, k)
        if self.kind.chunk is not None and may_cross:
            segment_ids = chunks_of(positions, segment_ids, self.kind.chunk, batch)
        sinks = None
        if part.attention_sinks:
            normal = nn.initializers.normal(config.initializer_range)
            sinks = self.param("sinks", normal, (config.num_attention_heads,))
        y = attend(
            self,
            (q, k, v),
            segment_ids,
            train=train,
            scale=(part.query_pre_attn_scalar or config.head_dim) ** -0.5,
            soft_cap=part.attn_logit_softcapping,
            sinks=sinks,
        )
        return rows(config, "out", use_bias=config.out_bias)(y.reshape(batch, length, -1))

    def _placed(
        self, positions: jax.Array, segment_ids: jax.Array | None, q: jax.Array, k: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Make queries and keys depend on positions."""
        config = self.config
        part = self.part
        if self.kind.rotary is not None:
            q, k = self.kind.rotary(positions, segment_ids, q, k)
            # Llama 4 normalises after the rotation, and without a scale.
            if part.qk_l2_norm:
                norm = nn.RMSNorm(config.norms.rms_norm_eps, config.dtype, use_scale=False)
                q = norm(q)
                k = norm(k)
        elif part.attn_temperature_tuning:
            # Positions grow beyond what 16 bits count exactly.
            wide: Any = np.promote_types(q.dtype, np.float32)
            steps = jnp.floor((positions.astype(wide) + 1) / part.floor_scale)
            factors = 1 + part.attn_scale * jnp.log1p(steps)
            q = (q * factors[:, :, None, None]).astype(q.dtype)
        return q, k


class LlamaFeedForward(nn.Module):
    """A gated network of width `size`: `down(activation(gate(x)) * up(x))`."""

    config: LlamaConfig
    size: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape."""
        config = self.config
        size = self.size or self.config.intermediate_size
        samples, positions = stream_axes(x.shape[0], x.shape[1])
        _, features = dividing_axes(x.shape[0], size)

        def wide(name: str) -> jax.Array:
            y = columns(config, size, name, use_bias=config.mlp_bias)(x)
            return constrained(y, samples, positions, features)

        gate = ACTIVATIONS[config.hidden_act](wide("gate"))
        return rows(config, "down", use_bias=config.mlp_bias)(gate * wide("up"))


class LlamaMixture(nn.Module):
    """A mixture of experts, plus a shared expert for all tokens if the configuration has one."""

    config: LlamaConfig
    experts: ExpertsConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape."""
        config = self.config
        experts = self.experts
        y = Experts(experts, config.initializer_range, config.dtype, name="experts")(x)
        if experts.shared_size:
            shared = LlamaFeedForward(config, experts.shared_size, name="shared")(x)
            if experts.shared_gate:
                gate = dense(config, 1, (None, None), "shared_gate", use_bias=False)(x)
                shared = nn.sigmoid(gate) * shared
            y = y + shared
        return y


def llama(config: LlamaConfig, *, multi_token: bool = False) -> list[LayerSpec]:
    """Make the layers of the decoder for `PipelineModule`: tokens `[B, T]` to logits `[B, T, V]`.

    The first layer is an `nn.Embed`, and the last is an `nn.Dense`, or the same embedding if it is
    tied. With `pipeline.split_vocabulary` each stage holds a part of them. Blocks use the side
    inputs `positions` and `segment_ids` if the batch has them.

    Args:
        config: The configuration.
        multi_token: Whether the model also predicts tokens after the next one, with
            `config.num_nextn_predict_layers` layers between the norm and the head. The logits are
            then `[B, 1 + num_nextn_predict_layers, T, V]`, for
            `jaxpipe.losses.multi_token_cross_entropy`, and the first and the last stage both hold
            the whole embedding. Without it, the weights of these layers are left out when files
            are read and written, as in `transformers`.

    Returns:
        The embedding, `num_hidden_layers` blocks, the norm, the layers of `multi_token`, and the
        head.

    Raises:
        ConfigError: `multi_token` is true, but the configuration has no layers for it.

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
        Touvron et al., "LLaMA" (2023), and `LlamaForCausalLM` of Hugging Face's `transformers`;
        `multi_token`: "DeepSeek-V3 Technical Report" (2024), section 2.2.
    """
    normal = nn.initializers.normal(config.initializer_range)
    of_table = Divided(normal, (MODEL, None), is_vocabulary=True)
    table: dict[str, Any] = {
        "num_embeddings": config.vocab_size,
        "features": config.hidden_size,
        "dtype": config.dtype,
        "embedding_init": of_table,
    }
    depths = _depths(config) if multi_token else 0
    first = _scaled if config.scale_embeddings else None
    block = None
    norm = None
    if depths:
        first = embed_and_carry
        block = block_and_carry
        norm = norm_and_carry
    middle = [
        LayerSpec(LlamaBlock, config, config.kind(layer), forward_fn=block)
        for layer in range(config.num_hidden_layers)
    ]
    args = config.norms.rms_norm_eps, config.dtype
    middle.append(LayerSpec(norm_class(config), *args, forward_fn=norm))
    for depth in range(1, depths + 1):
        # Like the last block, but always with experts if the model has any.
        kind = config.kind(config.num_hidden_layers - 1)
        extra = LlamaBlock(config, replace(kind, experts=config.experts))
        args = extra, of_table, depth == depths
        middle.append(TiedLayerSpec(_TABLE, MultiToken, config, *args, tied_weight_attr=_TABLE))

    def embed(forward_fn: Any = None) -> LayerSpec:
        return TiedLayerSpec(
            _TABLE, nn.Embed, **table, tied_weight_attr=_TABLE, forward_fn=forward_fn
        )

    cap = config.final_logit_softcapping
    if config.tie_word_embeddings:
        attend = nn.Embed.attend
        head = embed(attend if cap is None else SoftCapped(cap, attend))
        return _marked(config, [embed(first), *middle, head], depths)
    kernel_init = Divided(normal, (None, MODEL), is_vocabulary=True)
    head = LayerSpec(
        nn.Dense,
        config.vocab_size,
        use_bias=False,
        dtype=config.dtype,
        kernel_init=kernel_init,
        forward_fn=None if cap is None else SoftCapped(cap),
    )
    # The layers of `multi_token` look up tokens too, so the table is then tied.
    table_layer = embed(first) if depths else LayerSpec(nn.Embed, **table, forward_fn=first)
    return _marked(config, [table_layer, *middle, head], depths)


def _marked(config: LlamaConfig, layers: list[LayerSpec], depths: int) -> list[LayerSpec]:
    """Mark the layers as causal, unless one of them looks ahead or at the length of a text."""
    scaling = config.rotary.rope_scaling
    experts = config.experts
    # A capacity depends on the length, and first choices of later tokens go before second ones.
    uses_length = (scaling is not None and scaling.uses_length) or (
        experts is not None and experts.capacity_factor is not None
    )
    return layers if depths or uses_length else [layer.causal() for layer in layers]


def _depths(config: LlamaConfig) -> int:
    if not config.num_nextn_predict_layers:
        raise ConfigError(
            "multi_token needs a configuration with num_nextn_predict_layers >= 1, but got "
            "num_nextn_predict_layers=0. Set it with dataclasses.replace, or leave "
            "multi_token out.",
            paths=["num_nextn_predict_layers"],
        )
    return config.num_nextn_predict_layers


def llama_names(config: LlamaConfig | Source) -> tuple[Rename, ...]:
    """Make the table of Hugging Face's names for the weights of `llama(config)`.

    The table serves `llama(config, multi_token=True)` too. Otherwise, the weights of the layers
    that predict several tokens are skipped.

    Args:
        config: The configuration, or a source for `from_huggingface`.

    Returns:
        A table for `jaxpipe.weights.rename` and similar functions.
    """
    if not isinstance(config, LlamaConfig):
        config = LlamaConfig.from_huggingface(config)
    last = config.num_hidden_layers + 1
    extra = config.num_nextn_predict_layers
    table = with_copies("model.embed_tokens.weight", 0, config.num_hidden_layers, extra)
    head = with_copies("lm_head.weight", 1, config.num_hidden_layers, extra)
    if config.tie_word_embeddings:
        ends = [Rename((*table, *head), f"tied/{_TABLE}/embedding")]
    else:
        ends = [Rename(table, path) for path in ("0/embedding", f"tied/{_TABLE}/embedding")]
        places = {last + 1, last + 1 + extra}  # without and with the layers of `multi_token`
        ends += [Rename(head, f"{place}/kernel", transpose) for place in sorted(places)]
    family = config.nearest_family
    entries = (
        *ends,
        *family.names,
        *multi_token_names(family.names, config.num_hidden_layers, extra),
        Rename("model.norm.weight", f"{last}/scale"),
        # A constant in old files.
        Rename("model.layers.{i}.self_attn.rotary_emb.inv_freq", None),
    )
    return (*map(_in_whole, entries), _IMAGES) if family.text_of else entries


_IMAGES = Rename(
    tuple(
        f"{prefix}{name}.*"
        for name in ("vision_tower", "vision_model", "visual", "multi_modal_projector")
        for prefix in ("", "model.")
    ),
    None,
)
"""Weights of models with images that do not belong to their text part."""


def _in_whole(entry: Rename) -> Rename:
    """Add the names that a weight has in files of a model with images."""
    parts = [name.removeprefix("model.") for name in entry.their_names if "model." in name[:6]]
    names = (f"language_model.{name}" for name in entry.their_names)
    more = (f"model.language_model.{part}" for part in parts)
    return replace(entry, theirs=(*entry.their_names, *names, *more))


def _scaled(embed: Any, tokens: jax.Array) -> jax.Array:
    rows = embed(tokens)
    # Rounded to the dtype first, as in `transformers`: in bfloat16, sqrt(H) is another number.
    return rows * jnp.asarray(embed.features**0.5, rows.dtype)
