"""GPT-2: causal `DeepSpeedTransformerLayer`s with pre-layer normalisation."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax

from jaxpipe.config import Section, optional, read_flag, setting
from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, TiedLayerSpec
from jaxpipe.models.transformer import (
    DeepSpeedTransformerConfig,
    DeepSpeedTransformerLayer,
    read_float_dtype,
)
from jaxpipe.weights import Rename, Source, Transform, conv1d, merge, transpose

from ._huggingface import ConfigKeys, read_fields, shared_fields
from ._positions import positions_of
from ._readers import read_deviation, read_positive, read_share, read_size

_COMPUTED = {
    **dict.fromkeys(("activation_function", "hidden_act"), ("gelu_new", "gelu_pytorch_tanh")),
    "reorder_and_upcast_attn": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
}
_OTHER_NAMES = {
    **{"n_ctx": "n_positions", "max_position_embeddings": "n_positions", "hidden_size": "n_embd"},
    **{"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
}
"""Alternative names of a size, which `transformers` accepts or old files also contain."""


@dataclass(frozen=True)
class GPT2Config(Section):
    """Configuration of GPT-2, with Hugging Face's names where they exist.

    Attributes:
        vocab_size: Vocabulary size V. With `pipeline.split_vocabulary` it must be divisible by the
            number of stages; pad 50257 to 50304.
        n_positions: Length of the longest sequence.
        n_embd: Width H of the residual stream.
        n_layer: Number of blocks.
        n_head: Number of attention heads.
        n_inner: Width of the feed-forward network. None means 4 H.
        resid_pdrop: Dropout rate of the outputs that are added to the residual stream.
        embd_pdrop: Dropout rate of embeddings.
        attn_pdrop: Dropout rate of attention probabilities. cuDNN does not support it.
        layer_norm_epsilon: Added to variances in norms.
        initializer_range: Standard deviation of initial weights. It is smaller for projections to
            the residual stream.
        tie_word_embeddings: Whether the head shares the embedding table.
        dtype: The dtype of computation. None uses the dtype of weights and inputs, which a
            pipeline's `compute_dtype` sets.

    Raises:
        ConfigError: A value has a wrong type or is out of range.

    Example:
        >>> from jaxpipe.models import GPT2Config
        >>> GPT2Config().n_embd
        768
    """

    vocab_size: int = setting(50257, read_size)
    n_positions: int = setting(1024, read_size)
    n_embd: int = setting(768, read_size)
    n_layer: int = setting(12, read_size)
    n_head: int = setting(12, read_size)
    n_inner: int | None = setting(None, optional(read_size))
    resid_pdrop: float = setting(0.1, read_share)
    embd_pdrop: float = setting(0.1, read_share)
    attn_pdrop: float = setting(0.1, read_share)
    layer_norm_epsilon: float = setting(1e-5, read_positive)
    initializer_range: float = setting(0.02, read_deviation)
    tie_word_embeddings: bool = setting(True, read_flag)
    dtype: Any = setting(None, read_float_dtype)

    def __post_init__(self) -> None:
        # First, because the block's configuration is made from these fields.
        super().__post_init__()
        self.block()  # checks more rules

    @classmethod
    def from_huggingface(cls, source: Source) -> "GPT2Config":
        """Read a `config.json` of GPT-2.

        Unknown keys are named in a warning.

        Args:
            source: The folder with the file, the file itself, or its contents. Missing keys get the
                defaults of `transformers`.

        Returns:
            The configuration.

        Raises:
            ConfigError: A key has a value that these layers do not support.
        """
        keys = ConfigKeys(source, {"gpt2": _COMPUTED})
        config = cls(**read_fields(keys, cls))
        # Two names of a size must agree, or it is unknown which one the weights have.
        for other, name in _OTHER_NAMES.items():
            keys.check(other, getattr(config, name))
        keys.finish()
        return config

    def to_huggingface(self) -> dict[str, Any]:
        """Make the contents of a `config.json`, for `save_huggingface`.

        `from_huggingface` reads them back.
        """
        return {
            **{
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "activation_function": "gelu_new",
            },
            **{name: getattr(self, name) for name in shared_fields(self)},
        }

    def block(self) -> DeepSpeedTransformerConfig:
        """Return the configuration of a block."""
        return DeepSpeedTransformerConfig(
            hidden_size=self.n_embd,
            intermediate_size=4 * self.n_embd if self.n_inner is None else self.n_inner,
            heads=self.n_head,
            attn_dropout_ratio=self.attn_pdrop,
            hidden_dropout_ratio=self.resid_pdrop,
            num_hidden_layers=self.n_layer,
            initializer_range=self.initializer_range,
            layer_norm_eps=self.layer_norm_epsilon,
            causal=True,
            dtype=self.dtype,
        )


class Positions(nn.Module):
    """Adds learned position embeddings, then dropout."""

    config: GPT2Config

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Add the embeddings to `x`, `[B, T, H]`; the other arguments are integers `[B, T]`."""
        config = self.config
        length = x.shape[1]
        # Positions beyond the table would give NaN.
        if length > config.n_positions:
            raise LayerError(
                f"a sequence must have at most n_positions={config.n_positions} positions, but "
                f"got {length}. Cut it into shorter ones."
            )
        if positions is None:
            positions = positions_of(length, segment_ids)
        init = nn.initializers.normal(config.initializer_range)
        x = x + nn.Embed(
            config.n_positions, x.shape[-1], config.dtype, embedding_init=init, name="position"
        )(positions)
        return nn.Dropout(config.embd_pdrop, deterministic=not train)(x)


def gpt2(config: GPT2Config) -> list[LayerSpec]:
    """Make the layers of GPT-2 for `PipelineModule`: tokens `[B, T]` to logits `[B, T, V]`.

    The first layer is an `nn.Embed`, and the last is the same embedding or an `nn.Dense`. With
    `pipeline.split_vocabulary` each stage holds a part of them. The layers use the side inputs
    `positions` and `segment_ids` if the batch has them.

    Args:
        config: The configuration.

    Returns:
        The embedding, the positions, `n_layer` blocks, the norm and the head.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe
        >>> from jaxpipe.models import GPT2Config, gpt2
        >>> config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
        >>> model = jaxpipe.PipelineModule(gpt2(config), num_stages=1)
        >>> tokens = jnp.zeros((1, 5), int)
        >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
        (1, 5, 64)

    Reference:
        Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and
        `GPT2LMHeadModel` of Hugging Face's `transformers`.
    """
    init = nn.initializers.normal(config.initializer_range)
    sizes = (config.vocab_size, config.n_embd, config.dtype)
    blocks = [LayerSpec(DeepSpeedTransformerLayer, config.block()) for _ in range(config.n_layer)]
    positions = LayerSpec(Positions, config)
    norm = LayerSpec(nn.LayerNorm, config.layer_norm_epsilon, config.dtype, use_fast_variance=False)
    if config.tie_word_embeddings:
        first = TiedLayerSpec("embedding", nn.Embed, *sizes, embedding_init=init)
        head = TiedLayerSpec(
            "embedding", nn.Embed, *sizes, embedding_init=init, forward_fn=nn.Embed.attend
        )
    else:
        first = LayerSpec(nn.Embed, *sizes, embedding_init=init)
        head = LayerSpec(
            nn.Dense, config.vocab_size, use_bias=False, dtype=config.dtype, kernel_init=init
        )
    return [layer.causal() for layer in (first, positions, *blocks, norm, head)]


def gpt2_names(config: GPT2Config | Source) -> tuple[Rename, ...]:
    """Make the table of Hugging Face's names for the weights of `gpt2(config)`.

    Names in the first files of GPT-2 have no prefix `transformer.`.

    Args:
        config: The configuration, or a source for `from_huggingface`.

    Returns:
        A table for `jaxpipe.weights.rename` and similar functions.
    """
    if not isinstance(config, GPT2Config):
        config = GPT2Config.from_huggingface(config)

    def entry(theirs: str, ours: str, transform: Transform | None = None) -> Rename:
        return Rename((f"transformer.{theirs}", theirs), ours, transform)

    layers: dict[str, tuple[str, Transform | None]] = {
        "norm_w": ("ln_1.weight", None),
        "norm_b": ("ln_1.bias", None),
        "attn_qkvw": ("attn.c_attn.weight", conv1d(1, 3)),
        "attn_qkvb": ("attn.c_attn.bias", merge((0, 1, 2))),
        "attn_ow": ("attn.c_proj.weight", conv1d(2, 1)),
        "attn_ob": ("attn.c_proj.bias", None),
        "attn_nw": ("ln_2.weight", None),
        "attn_nb": ("ln_2.bias", None),
        # `Conv1D` of GPT-2 stores `[in, out]`, as we do.
        "inter_w": ("mlp.c_fc.weight", None),
        "inter_b": ("mlp.c_fc.bias", None),
        "output_w": ("mlp.c_proj.weight", None),
        "output_b": ("mlp.c_proj.bias", None),
    }
    table = "wte.weight"
    head = "lm_head.weight"
    last = config.n_layer + 2
    # An untied head is in files as torch's `Linear`, `[out, in]`.
    ends = [entry(table, "0/embedding"), Rename(head, f"{last + 1}/kernel", transpose)]
    tied = Rename((f"transformer.{table}", table, head), "tied/embedding/embedding")
    return (
        *([tied] if config.tie_word_embeddings else ends),
        entry("wpe.weight", "1/position/embedding"),
        *(
            entry("h.{i}." + theirs, "{i+2}/" + ours, transform)
            for ours, (theirs, transform) in layers.items()
        ),
        entry("ln_f.weight", f"{last}/scale"),
        entry("ln_f.bias", f"{last}/bias"),
        # Masks in old files.
        *(
            Rename(f"{start}h.{{i}}.attn.{mask}", None)
            for start in ("transformer.", "")
            for mask in ("bias", "masked_bias")
        ),
    )
