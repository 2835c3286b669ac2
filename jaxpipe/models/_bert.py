"""BERT: bidirectional `DeepSpeedTransformerLayer`s with post-layer normalisation."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jaxpipe.config import Section, one_of_exactly, setting
from jaxpipe.errors import ConfigError, LayerError
from jaxpipe.layers import LayerSpec, TiedLayerSpec
from jaxpipe.models.transformer import (
    DeepSpeedTransformerConfig,
    DeepSpeedTransformerLayer,
    read_float_dtype,
)
from jaxpipe.weights import Rename, Source, Transform, linear, merge, stack, transpose

from ._activations import ACTIVATIONS
from ._huggingface import ConfigKeys, read_fields, shared_fields
from ._positions import positions_of
from ._readers import read_deviation, read_positive, read_share, read_size

BertHead = Literal["masked_lm"] | None

_COMPUTED = {
    "is_decoder": (False,),
    "position_embedding_type": ("absolute",),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class BertConfig(Section):
    """Configuration of BERT, with Hugging Face's names where they exist.

    Attributes:
        vocab_size: Vocabulary size V.
        hidden_size: Width H of the residual stream.
        num_hidden_layers: Number of layers.
        num_attention_heads: Number of attention heads.
        intermediate_size: Width of the feed-forward network.
        hidden_act: Its activation: `"gelu"`, `"gelu_new"` or `"gelu_pytorch_tanh"` (the tanh
            approximation under two names), `"relu"` or `"silu"`.
        hidden_dropout_prob: Dropout rate of embeddings and of the outputs that are added to the
            residual stream.
        attention_probs_dropout_prob: Dropout rate of attention probabilities. cuDNN does not
            support it.
        max_position_embeddings: Length of the longest sequence.
        type_vocab_size: Number of token types.
        initializer_range: Standard deviation of initial weights.
        layer_norm_eps: Added to variances in norms.
        dtype: The dtype of computation. None uses the dtype of weights and inputs, which a
            pipeline's `compute_dtype` sets.

    Raises:
        ConfigError: A value has a wrong type or is out of range.

    Example:
        >>> from jaxpipe.models import BertConfig
        >>> BertConfig().hidden_size
        768
    """

    vocab_size: int = setting(30522, read_size)
    hidden_size: int = setting(768, read_size)
    num_hidden_layers: int = setting(12, read_size)
    num_attention_heads: int = setting(12, read_size)
    intermediate_size: int = setting(3072, read_size)
    hidden_act: str = setting("gelu", one_of_exactly(*ACTIVATIONS))
    hidden_dropout_prob: float = setting(0.1, read_share)
    attention_probs_dropout_prob: float = setting(0.1, read_share)
    max_position_embeddings: int = setting(512, read_size)
    type_vocab_size: int = setting(2, read_size)
    initializer_range: float = setting(0.02, read_deviation)
    layer_norm_eps: float = setting(1e-12, read_positive)
    dtype: Any = setting(None, read_float_dtype)

    def __post_init__(self) -> None:
        # First, because the layer's configuration is made from these fields.
        super().__post_init__()
        self.layer()  # checks more rules

    @classmethod
    def from_huggingface(cls, source: Source) -> "BertConfig":
        """Read a `config.json` of BERT.

        Unknown keys are named in a warning.

        Args:
            source: The folder with the file, the file itself, or its contents. Missing keys get the
                defaults of `transformers`.

        Returns:
            The configuration.

        Raises:
            ConfigError: A key has a value that these layers do not support.
        """
        keys = ConfigKeys(source, {"bert": _COMPUTED})
        config = cls(**read_fields(keys, cls))
        keys.finish()
        return config

    def to_huggingface(self, head: BertHead = "masked_lm") -> dict[str, Any]:
        """Make the contents of a `config.json`, for `save_huggingface`.

        `from_huggingface` reads them back.

        Args:
            head: As for `bert`. It decides which class of `transformers` opens the files.

        Returns:
            The contents.
        """
        opened = "BertModel" if head is None else "BertForMaskedLM"
        fields = {name: getattr(self, name) for name in shared_fields(self)}
        return {"model_type": "bert", "architectures": [opened], **fields}

    def layer(self) -> DeepSpeedTransformerConfig:
        """Return the configuration of a layer."""
        return DeepSpeedTransformerConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.num_attention_heads,
            attn_dropout_ratio=self.attention_probs_dropout_prob,
            hidden_dropout_ratio=self.hidden_dropout_prob,
            num_hidden_layers=self.num_hidden_layers,
            initializer_range=self.initializer_range,
            adjust_init_range=False,
            layer_norm_eps=self.layer_norm_eps,
            pre_layer_norm=False,
            activation=ACTIVATIONS[self.hidden_act],
            dtype=self.dtype,
        )


class BertEmbeddings(nn.Module):
    """Adds position and token type embeddings to token embeddings; then norm and dropout."""

    config: BertConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        token_type_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array:
        """Add the embeddings to `x`, `[B, T, H]`; the other arguments are integers `[B, T]`."""
        config = self.config
        length = x.shape[1]
        # Positions beyond the table would give NaN.
        if length > config.max_position_embeddings:
            raise LayerError(
                "a sequence must have at most "
                f"max_position_embeddings={config.max_position_embeddings} positions, but got "
                f"{length}. Cut it into shorter ones."
            )
        # A batch without types is one text, whose tokens are all of type 0, as in `transformers`.
        types = jnp.zeros((1, length), jnp.int32) if token_type_ids is None else token_type_ids
        positions = positions_of(length, segment_ids) if positions is None else positions
        x = x + _table(config, config.type_vocab_size, "token_type")(types)
        x = x + _table(config, config.max_position_embeddings, "position")(positions)
        return nn.Dropout(config.hidden_dropout_prob, deterministic=not train)(_norm(config)(x))


class BertTransform(nn.Module):
    """The layer before the logits of masked tokens: a dense layer, the activation and a norm."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape."""
        config = self.config
        init = nn.initializers.normal(config.initializer_range)
        y = nn.Dense(config.hidden_size, dtype=config.dtype, kernel_init=init, name="dense")(x)
        return _norm(config)(ACTIVATIONS[config.hidden_act](y))


class BertLogits(nn.Module):
    """Logits from the embedding table, with a bias for each token."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to `[B, T, V]`."""
        config = self.config
        init = nn.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        bias = self.param("bias", nn.initializers.zeros, shape[:1])
        # As `nn.Embed.attend` does, which has no bias.
        x, table, bias = promote_dtype(
            x, self.param("embedding", init, shape), bias, dtype=config.dtype
        )
        return x @ table.T + bias.reshape(1, 1, -1)


def bert(config: BertConfig, head: BertHead = "masked_lm") -> list[LayerSpec]:
    """Make the layers of BERT for `PipelineModule`.

    The layers use the side inputs `attention_mask` (`[B, T]`, true for tokens to attend to) or
    `lengths`, `token_type_ids`, `positions` and `segment_ids` if the batch has them.

    Args:
        config: The configuration.
        head: `"masked_lm"` maps tokens `[B, T]` to logits `[B, T, V]` with the embedding table.
            None maps them to `[B, T, H]`.

    Returns:
        The embedding, the positions and types, `num_hidden_layers` layers, and for `"masked_lm"`
        the transform and the logits.

    Raises:
        ConfigError: The head is neither of these.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe
        >>> from jaxpipe.models import BertConfig, bert
        >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32)
        >>> config = BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
        >>> model = jaxpipe.PipelineModule(bert(config, head=None), num_stages=1)
        >>> tokens = jnp.zeros((1, 5), int)
        >>> model.apply(model.init(jax.random.key(0), tokens), tokens).shape
        (1, 5, 16)

    Reference:
        Devlin et al., "BERT" (2018), and `BertForMaskedLM` of Hugging Face's `transformers`.
    """
    if head not in (*get_args(get_args(BertHead)[0]), None):
        raise ConfigError(
            f"head must be 'masked_lm' or None, but got head={head!r}. Use None and append your "
            "own layers."
        )
    init = nn.initializers.normal(config.initializer_range)
    sizes = (config.vocab_size, config.hidden_size, config.dtype)
    layers = [
        LayerSpec(BertEmbeddings, config),
        *[
            LayerSpec(DeepSpeedTransformerLayer, config.layer())
            for _ in range(config.num_hidden_layers)
        ],
    ]
    # The table is not tied: no other layer uses it.
    if head is None:
        return [LayerSpec(nn.Embed, *sizes, embedding_init=init), *layers]
    tied = "embedding"
    first = TiedLayerSpec(tied, nn.Embed, *sizes, embedding_init=init, tied_weight_attr=tied)
    logits = TiedLayerSpec(tied, BertLogits, config, tied_weight_attr=tied)
    return [first, *layers, LayerSpec(BertTransform, config), logits]


def bert_names(config: BertConfig | Source, head: BertHead = "masked_lm") -> tuple[Rename, ...]:
    """Make the table of Hugging Face's names for the weights of `bert(config, head)`.

    Names in files of the bare model have no prefix `bert.`.

    Args:
        config: The configuration, or a source for `from_huggingface`.
        head: As for `bert`. Weights that belong only to other heads are ignored.

    Returns:
        A table for `jaxpipe.weights.rename` and similar functions.
    """
    if not isinstance(config, BertConfig):
        config = BertConfig.from_huggingface(config)

    def entry(theirs: str, ours: str, transform: Transform | None = None) -> Rename:
        # The bare model is written with the names of `BertModel`.
        names = (theirs, f"bert.{theirs}") if head is None else (f"bert.{theirs}", theirs)
        return Rename(_with_old(*names), ours, transform)

    own = "attention.self.{p}"
    each = ("query", "key", "value")
    layers: dict[str, tuple[str, Transform | None]] = {
        "attn_qkvw": (f"{own}.weight", stack(linear(1, 2), 1, each)),
        "attn_qkvb": (f"{own}.bias", stack(merge((0, 1)), 0, each)),
        "attn_ow": ("attention.output.dense.weight", linear(2, 1)),
        "attn_ob": ("attention.output.dense.bias", None),
        "attn_nw": ("attention.output.LayerNorm.weight", None),
        "attn_nb": ("attention.output.LayerNorm.bias", None),
        "inter_w": ("intermediate.dense.weight", transpose),
        "inter_b": ("intermediate.dense.bias", None),
        "output_w": ("output.dense.weight", transpose),
        "output_b": ("output.dense.bias", None),
        "norm_w": ("output.LayerNorm.weight", None),
        "norm_b": ("output.LayerNorm.bias", None),
    }
    table = "embeddings.word_embeddings.weight"
    at = "cls.predictions"
    last = config.num_hidden_layers + 2
    decoder = f"{at}.decoder"
    # Files may have the table under three names, of which the decoder's is a copy.
    tied = Rename((f"bert.{table}", table, f"{decoder}.weight"), "tied/embedding/embedding")
    transform = f"{at}.transform.dense"
    norm = f"{at}.transform.LayerNorm"
    of_head = [
        tied,
        Rename(f"{transform}.weight", f"{last}/dense/kernel", transpose),
        Rename(f"{transform}.bias", f"{last}/dense/bias"),
        Rename(_with_old(f"{norm}.weight"), f"{last}/norm/scale"),
        Rename(_with_old(f"{norm}.bias"), f"{last}/norm/bias"),
        Rename((f"{at}.bias", f"{decoder}.bias"), f"{last + 1}/bias"),
    ]
    others = ["pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"]
    passed = [*others, *(f"bert.{name}" for name in others)]
    heads = ("cls.seq_relationship", "classifier", "qa_outputs")
    passed += [f"{name}.{part}" for name in heads for part in ("weight", "bias")]
    # Without a head, tensors of the head are in many files, and are left out.
    passed += (
        []
        if head
        else [name for rename in of_head[1:] for name in rename.their_names] + [f"{decoder}.weight"]
    )
    return (
        *(of_head if head else [entry(table, "0/embedding")]),
        entry("embeddings.position_embeddings.weight", "1/position/embedding"),
        entry("embeddings.token_type_embeddings.weight", "1/token_type/embedding"),
        entry("embeddings.LayerNorm.weight", "1/norm/scale"),
        entry("embeddings.LayerNorm.bias", "1/norm/bias"),
        *(
            entry("encoder.layer.{i}." + theirs, "{i+2}/" + ours, transform)
            for ours, (theirs, transform) in layers.items()
        ),
        *(Rename(name, None) for name in passed),
    )


def _with_old(*names: str) -> tuple[str, ...]:
    """Add the names that norms have in old files from TensorFlow to the names of a tensor."""
    old = [
        name.removesuffix(new) + before
        for name in names
        for new, before in (
            ("LayerNorm.weight", "LayerNorm.gamma"),
            ("LayerNorm.bias", "LayerNorm.beta"),
        )
        if name.endswith(new)
    ]
    return (*names, *old)


def _norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.layer_norm_eps, config.dtype, use_fast_variance=False, name="norm")


def _table(config: BertConfig, size: int, name: str) -> nn.Embed:
    init = nn.initializers.normal(config.initializer_range)
    return nn.Embed(size, config.hidden_size, config.dtype, embedding_init=init, name=name)
