"""Configuration of the Llama decoder, and conversion from and to Hugging Face's `config.json`."""

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, get_args

import jax.numpy as jnp

from jaxpipe._numbers import as_number
from jaxpipe.errors import ConfigError
from jaxpipe.transformer import OverSequence
from jaxpipe.weights import Rename, Source

from ._activations import ACTIVATIONS
from ._experts_config import ExpertsConfig
from ._families import FAMILIES, Family
from ._huggingface import ConfigKeys
from ._latent_config import LatentConfig
from ._llama_keys import SIZES, read_llama, read_text, write_llama
from ._rotary import Rotary, RotaryScaling
from ._rules import (
    Rule,
    are_deviations,
    are_flags,
    are_positive,
    are_shares,
    are_sizes,
    check_fields,
    is_size,
)
from ._windows import CHUNKED, FULL, SLIDING


@dataclass(frozen=True)
class BlockKind:
    """What distinguishes a block from other blocks of the same model.

    Attributes:
        window: Number of positions that a query sees, including its own. None means all earlier
            positions.
        chunk: Number of positions of a chunk. A query sees only earlier positions of its own chunk.
            None means that a text is not divided into chunks.
        rotary: The rotary embedding. None means that queries and keys are not rotated.
        is_mixture: Whether its feed-forward network is the mixture of experts.
    """

    window: int | None = None
    chunk: int | None = None
    rotary: Rotary | None = None
    is_mixture: bool = False


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a decoder, with Hugging Face's names where they exist.

    Attributes:
        vocab_size: Vocabulary size V.
        hidden_size: Width H of the residual stream.
        intermediate_size: Width of feed-forward networks that are not mixtures.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number N of query heads.
        num_key_value_heads: Number K of key and value heads. It must divide N. None means N.
        head_dim: Size D of a head. None means H / N.
        rms_norm_eps: Added to the mean of squares in norms.
        rope_theta: Base of the wavelengths of the rotary embedding.
        rope_scaling: Scaling of these wavelengths for longer contexts.
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the feed-forward network has biases.
        qk_norm: Whether each head of queries and keys is normalised before the rotary embedding.
        sliding_window: Number of positions that a query sees, including its own, in layers with a
            window. None means all.
        layer_types: `"full_attention"`, `"sliding_attention"` or `"chunked_attention"` for each
            layer. None means that all layers have the window.
        tie_word_embeddings: Whether the head shares the embedding table.
        attention_dropout: Dropout rate of attention probabilities.
        initializer_range: Standard deviation of initial weights.
        hidden_act: Activation of the gate of feed-forward networks that are not mixtures: `"silu"`,
            `"gelu"`, `"gelu_pytorch_tanh"` or `"relu"`.
        partial_rotary_factor: Share of a head's dims that are rotated, from the first.
        rope_local_base_freq: Base of the wavelengths in layers with a window, which are not scaled.
            None means that they are rotated like the others.
        nope_layers: Layers, counted from 0, whose queries and keys are not rotated.
        zero_centered_norms: Whether norms multiply by 1 + scale instead of scale.
        post_norms: Whether the results of attention and feed-forward network are also normalised,
            before they are added to the residual stream.
        scale_embeddings: Whether embeddings are multiplied by sqrt(H), rounded to their dtype.
        query_pre_attn_scalar: Scores are multiplied by its inverse square root. None means D.
        attn_logit_softcapping: Scores become `cap * tanh(scores / cap)` with this cap. None means
            that they are not capped.
        final_logit_softcapping: The same for the logits.
        rope_interleave: Whether positions rotate pairs of neighbouring dims. Otherwise, a pair
            consists of the i-th dim of the first half and of the second half of the rotated dims.
        qk_l2_norm: Whether each head of queries and keys is normalised after the rotary embedding,
            without scales, in layers that have one.
        attn_temperature_tuning: Whether queries of layers without a rotary embedding are multiplied
            by `1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`.
        floor_scale: See `attn_temperature_tuning`.
        attn_scale: See `attn_temperature_tuning`.
        attention_sinks: Whether each head of queries has a learned score that takes part in the
            softmax, but has no value.
        attention_chunk_size: Number of positions of a chunk in layers with chunks. A query sees
            only positions of its own chunk.
        experts: The mixture of experts that replaces the feed-forward networks. None means no
            mixture.
        latent: Sizes of multi-head latent attention, with which `head_dim` is
            `latent.qk_rope_head_dim`, as in `transformers`. None means ordinary heads.
        num_nextn_predict_layers: Number of layers in Hugging Face's files that predict tokens after
            the next one; see `llama`.
        dtype: The dtype of computation. None uses the dtype of weights and inputs, which a
            pipeline's `compute_dtype` sets.
        shard_sequence: Whether the residual stream is divided along the positions over the mesh
            axis `model`, if the axis divides their number.
        sequence: How attention is computed if the mesh has an axis `sequence`, which divides the
            residual stream: `"auto"`, `"ulysses"` or `"ring"`, as in `jaxpipe.attention`.
        family: The family in `transformers`, as the `model_type` of `config.json`. It decides only
            the names of weights in Hugging Face's files, not any results. None selects the first
            family that can represent this configuration.

    Raises:
        ConfigError: A value has a wrong type, is out of range, or contradicts another.

    Example:
        >>> from jaxpipe.models import LlamaConfig
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        >>> LlamaConfig(**sizes, num_attention_heads=4).head_dim
        8
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]  # an integer once it is made
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    partial_rotary_factor: float = 1.0
    rope_local_base_freq: float | None = None
    nope_layers: tuple[int, ...] = ()
    zero_centered_norms: bool = False
    post_norms: bool = False
    scale_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_interleave: bool = False
    qk_l2_norm: bool = False
    attn_temperature_tuning: bool = False
    floor_scale: int = 8192
    attn_scale: float = 0.1
    attention_sinks: bool = False
    attention_chunk_size: int | None = None
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    num_nextn_predict_layers: int = 0
    dtype: Any = None
    shard_sequence: bool = False
    sequence: OverSequence = "auto"
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        can_divide = is_size(self.hidden_size) and is_size(self.num_attention_heads)
        size = self.hidden_size // self.num_attention_heads if can_divide else None
        size = self.latent.qk_rope_head_dim if isinstance(self.latent, LatentConfig) else size
        for name, default in {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": size,
        }.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("layer_types", "nope_layers"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(self, self._rules())

    @classmethod
    def from_huggingface(cls, source: Source) -> "LlamaConfig":
        """Read a `config.json` of one of the families that `family` can name.

        SmolLM is read as a Llama. Of a model with images, only the text part is read. Unknown keys
        are named in a warning.

        Args:
            source: The folder with the file, the file itself, or its contents. Missing keys get the
                defaults of `transformers`.

        Returns:
            The configuration.

        Raises:
            ConfigError: A key has a value that these layers do not support.
        """
        keys = ConfigKeys(
            read_text(source),
            {name: {**_COMPUTED, **family.computed} for name, family in FAMILIES.items()},
            {name: family.sizes for name, family in FAMILIES.items()},
        )
        defaults = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        found = read_llama(keys, FAMILIES[keys.model_type], defaults)
        config = cls(**found, family=keys.model_type)
        keys.finish()
        return config

    def to_huggingface(self, max_position_embeddings: int) -> dict[str, Any]:
        """Make the contents of a `config.json`, for `save_huggingface`.

        `from_huggingface` reads them back. The family is `family`, or the first family that can
        represent this configuration.

        Args:
            max_position_embeddings: Length of the longest sequence that the model was trained for.

        Returns:
            The contents.

        Raises:
            ConfigError: No family of `transformers` can represent this configuration, or the given
                one cannot.
        """
        name, lost = self._nearest()
        if lost:
            listed = ", ".join(f"{key}={value!r}" for key, value in lost.items())
            raise ConfigError(
                f"a configuration must be that of a family of transformers, but got {listed}, "
                f"which {name if self.family else name + ', the nearest,'} does not have. Write "
                "the weights with export_safetensors, for your own layers."
            )
        return write_llama(self, name, FAMILIES[name], max_position_embeddings)

    @property
    def names(self) -> tuple[Rename, ...]:
        """The names of the weights of blocks in Hugging Face's files."""
        return FAMILIES[self._nearest()[0]].names

    @property
    def is_text_part(self) -> bool:
        """Whether files of a model with images may hold the weights."""
        return FAMILIES[self._nearest()[0]].text_of is not None

    def _nearest(self) -> tuple[str, dict[str, Any]]:
        """Return the family that represents this best, and the fields that it cannot represent."""
        if self.family is not None:
            return self.family, self._lost(self.family)
        lost = {name: self._lost(name) for name, family in FAMILIES.items() if self._is_kin(family)}
        return min(lost.items(), key=lambda item: len(item[1]))

    def _is_kin(self, family: Family) -> bool:
        """Whether a family has experts, and a shared expert, exactly if this configuration does."""
        if self.experts is None or family.mixture is None:
            return self.experts is None and family.mixture is None
        return (self.experts.shared_size > 0) == family.mixture.has_shared

    def _lost(self, name: str) -> dict[str, Any]:
        """Return the fields that do not survive a round trip through a family's `config.json`."""
        written = write_llama(self, name, FAMILIES[name], 1)
        try:
            again = LlamaConfig.from_huggingface(written)._numbers()
        except ConfigError:  # a family without the fields that others depend on
            return self._numbers()
        return {key: value for key, value in self._numbers().items() if again[key] != value}

    def _numbers(self) -> dict[str, Any]:
        """Return the fields that decide a trained model's results, in a canonical form."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        experts = self.experts
        if experts is not None:
            told["experts"] = replace(experts, capacity_factor=None, balance=0.0, z_loss=0.0)
            # If every layer has experts, nothing uses the width of other feed-forward networks.
            told["intermediate_size"] = self.intermediate_size if experts.dense_layers else None
        kinds = [self.kind(layer) for layer in range(self.num_hidden_layers)]
        told["layer_types"] = [(kind.window, kind.chunk) for kind in kinds]
        # A base that no layer uses, or that the others have too.
        are_alike = self.rope_local_base_freq == self.rope_theta and self.rope_scaling is None
        if are_alike or not any(kind.window for kind in kinds):
            told["rope_local_base_freq"] = None
        if self.query_pre_attn_scalar == self.head_dim:
            told["query_pre_attn_scalar"] = None
        if not (self.attn_temperature_tuning and self.nope_layers):
            names = "attn_temperature_tuning", "floor_scale", "attn_scale"
            told |= dict.fromkeys(names)
        return {name: value for name, value in told.items() if name not in _NOT_NUMBERS}

    def kind(self, layer: int) -> BlockKind:
        """Return what distinguishes the block of a layer, counted from 0."""
        kind = SLIDING if self.layer_types is None else self.layer_types[layer]
        window = self.sliding_window if kind == SLIDING else None
        return BlockKind(
            window,
            self.attention_chunk_size if kind == CHUNKED else None,
            None if layer in self.nope_layers else self._rotary(is_local=window is not None),
            self.experts is not None and layer not in self.experts.dense_layers,
        )

    def _rotary(self, *, is_local: bool) -> Rotary:
        theta = self.rope_theta
        scaling = self.rope_scaling
        if is_local and self.rope_local_base_freq is not None:
            theta = self.rope_local_base_freq
            scaling = None
        return Rotary(self._rotated_dims, theta, scaling, self.rope_interleave)

    @property
    def _rotated_dims(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    def _rules(self) -> Iterator[Rule]:
        yield from are_sizes(self, (*SIZES, "num_key_value_heads", "head_dim"))
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads
        yield (
            *(
                "num_key_value_heads",
                heads % kv_heads == 0,
                f"a divisor of num_attention_heads={heads}",
            ),
            "Each of these heads serves an equal number of heads of queries.",
        )
        yield from are_sizes(self, ("num_nextn_predict_layers",), least=0)
        are_plain = not (self.scale_embeddings or self.zero_centered_norms)
        rule = "0 with scale_embeddings or zero_centered_norms"
        has_extra = self.num_nextn_predict_layers > 0
        yield "num_nextn_predict_layers", are_plain or not has_extra, rule, "Leave it out."
        yield from self._latent_rules()
        share = as_number(self.partial_rotary_factor)
        is_share = share is not None and 0 < share <= 1
        yield "partial_rotary_factor", is_share, "in (0, 1]", "Use 1.0 to rotate all dims."
        dims = self._rotated_dims
        if dims == self.head_dim:
            yield "head_dim", dims % 2 == 0, "even", "Positions turn pairs of dims."
        rule = f"a share of an even number of the head_dim={self.head_dim} dims"
        yield "partial_rotary_factor", dims > 0 and dims % 2 == 0, rule, "Pairs are rotated."
        is_scaling = self.rope_scaling is None or isinstance(self.rope_scaling, RotaryScaling)
        yield (
            "rope_scaling",
            is_scaling,
            "a RotaryScaling or None",
            "Make one with RotaryScaling.from_dict.",
        )
        is_dynamic = self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic"
        yield (
            "head_dim",
            dims > 2 or not is_dynamic,
            "> 2 with rope_type='dynamic'",
            "It is divided by D - 2.",
        )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope_scaling, name, None)
            is_each = factors is None or len(factors) == dims // 2
            rule = f"a scaling with one {name} for each of the {dims // 2} pairs of rotated dims"
            yield "rope_scaling", is_each, rule, "Copy the list from the model's config.json."
        window = self.sliding_window
        yield (
            "sliding_window",
            window is None or is_size(window),
            "an integer >= 1 or None",
            "It counts positions.",
        )
        chunk = self.attention_chunk_size
        is_chunk = chunk is None or is_size(chunk)
        yield "attention_chunk_size", is_chunk, "an integer >= 1 or None", "It counts positions."
        yield from are_sizes(self, ("floor_scale",))
        yield from are_positive(self, ("rms_norm_eps", "attn_scale"))
        caps = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        yield from are_positive(self, [name for name in caps if getattr(self, name) is not None])
        if self.rope_local_base_freq is not None:
            yield from are_positive(self, ("rope_local_base_freq",), above=1.0)
        is_known = isinstance(self.hidden_act, str) and self.hidden_act in ACTIVATIONS
        yield "hidden_act", is_known, f"one of {', '.join(ACTIVATIONS)}", "Use one of them."
        is_silu = self.experts is None or self.hidden_act == "silu"
        yield "hidden_act", is_silu, "'silu' with experts", "Experts compute nothing else."
        yield from are_positive(self, ("rope_theta",), above=1.0)
        yield from are_deviations(self, ("initializer_range",))
        yield from are_shares(self, ("attention_dropout",))
        flags = (
            "qkv_bias",
            "out_bias",
            "mlp_bias",
            "qk_norm",
            "zero_centered_norms",
            "post_norms",
            "scale_embeddings",
            "attention_sinks",
            "rope_interleave",
            "qk_l2_norm",
            "attn_temperature_tuning",
            "tie_word_embeddings",
            "shard_sequence",
        )
        yield from are_flags(self, flags)
        ways = get_args(OverSequence)
        yield "sequence", self.sequence in ways, f"one of {', '.join(ways)}", 'Use "auto".'
        dense = () if self.experts is None else self.experts.dense_layers
        are_there = all(layer < self.num_hidden_layers for layer in dense)
        rule = f"a mixture with dense_layers below num_hidden_layers={self.num_hidden_layers}"
        yield "experts", are_there, rule, "Layers are counted from 0."
        skipped = self.nope_layers
        are_layers = isinstance(skipped, tuple) and all(
            is_size(layer, 0) and layer < self.num_hidden_layers for layer in skipped
        )
        rule = f"a tuple of layers below num_hidden_layers={self.num_hidden_layers}"
        yield "nope_layers", are_layers, rule, "Layers are counted from 0."
        kinds = self.layer_types
        is_listed = kinds is None or (
            isinstance(kinds, tuple) and len(kinds) == self.num_hidden_layers
        )
        rule = (
            f"None or one of {FULL!r}, {SLIDING!r} and {CHUNKED!r} for each of "
            f"num_hidden_layers={self.num_hidden_layers}"
        )
        are_known = is_listed and all(kind in (FULL, SLIDING, CHUNKED) for kind in kinds or ())
        yield "layer_types", are_known, rule, "Layers of other types are not known here."
        for name, kind in {"sliding_window": SLIDING, "attention_chunk_size": CHUNKED}.items():
            is_given = getattr(self, name) is not None or kind not in (kinds or ())
            yield name, is_given, f"given for layers of {kind!r}", "Pass it."
        is_float = self.dtype is None or jnp.issubdtype(self.dtype, jnp.floating)
        yield "dtype", is_float, "a floating-point dtype or None", "Leave it out."
        is_known = self.family is None or self.family in FAMILIES
        yield "family", is_known, f"None or one of {', '.join(FAMILIES)}", "Leave it out."

    def _latent_rules(self) -> Iterator[Rule]:
        latent = self.latent
        if latent is None:
            return
        is_latent = isinstance(latent, LatentConfig)
        yield "latent", is_latent, "a LatentConfig or None", "Make one with its sizes."
        rule = f"latent.qk_rope_head_dim={latent.qk_rope_head_dim} or None"
        is_right = self.head_dim == latent.qk_rope_head_dim
        yield "head_dim", is_right, rule, "latent has the other sizes of a head."
        is_right = self.num_key_value_heads == self.num_attention_heads
        rule = f"num_attention_heads={self.num_attention_heads} with latent"
        yield "num_key_value_heads", is_right, rule, "Each head has its own keys and values."
        defaults = {each.name: each.default for each in fields(self)}
        for name in _NOT_LATENT:
            is_default = getattr(self, name) == defaults[name]
            rule = f"{defaults[name]} with latent"
            yield name, is_default, rule, "Latent attention computes nothing of the kind."


_NOT_LATENT = (
    "qk_norm",
    "qk_l2_norm",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "attention_chunk_size",
    "attention_sinks",
)
"""Fields that only attention without a latent has."""

_NOT_NUMBERS = (
    "dtype",
    "shard_sequence",
    "sequence",
    "sliding_window",
    "attention_chunk_size",
    "family",
)
"""Fields that decide no results, or whose results other fields in canonical form tell."""

_COMPUTED = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "output_router_logits"), (False,)),
    "router_jitter_noise": (0.0,),
}
