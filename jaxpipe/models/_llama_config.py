"""Configuration of the Llama decoder, and conversion from and to Hugging Face's `config.json`."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, get_args

from jaxpipe.config import (
    Section,
    list_of,
    one_of_exactly,
    optional,
    read_flag,
    required,
    setting,
    subsection,
    wrong_value,
)
from jaxpipe.errors import ConfigError
from jaxpipe.transformer import OverSequence, read_float_dtype
from jaxpipe.weights import Rename, Source

from ._activations import ACTIVATIONS
from ._experts_config import ExpertsConfig
from ._families import FAMILIES, Family
from ._huggingface import ConfigKeys
from ._latent_config import LatentConfig
from ._llama_keys import read_llama, read_text, write_llama
from ._readers import (
    read_base,
    read_count,
    read_deviation,
    read_layers,
    read_positive,
    read_share,
    read_size,
)
from ._rotary import Rotary, RotaryScaling
from ._windows import CHUNKED, FULL, SLIDING


def _read_part(value: object, path: str) -> float:
    part = read_positive(value, path)
    if part > 1:
        raise wrong_value(path, "in (0, 1]", value, "Use 1.0 to rotate all dims")
    return part


_read_kinds = optional(list_of(one_of_exactly(FULL, SLIDING, CHUNKED)))


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
class LlamaConfig(Section):
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

    vocab_size: int = required(read_size)
    hidden_size: int = required(read_size)
    intermediate_size: int = required(read_size)
    num_hidden_layers: int = required(read_size)
    num_attention_heads: int = required(read_size)
    num_key_value_heads: int = setting(None, optional(read_size))
    head_dim: int = setting(None, optional(read_size))
    rms_norm_eps: float = setting(1e-6, read_positive)
    rope_theta: float = setting(10000.0, read_base)
    rope_scaling: RotaryScaling | None = subsection(RotaryScaling, absent=True)
    qkv_bias: bool = setting(False, read_flag)
    out_bias: bool = setting(False, read_flag)
    mlp_bias: bool = setting(False, read_flag)
    qk_norm: bool = setting(False, read_flag)
    sliding_window: int | None = setting(None, optional(read_size))
    layer_types: tuple[str, ...] | None = setting(
        None, optional(list_of(one_of_exactly(FULL, SLIDING, CHUNKED)))
    )
    tie_word_embeddings: bool = setting(False, read_flag)
    attention_dropout: float = setting(0.0, read_share)
    initializer_range: float = setting(0.02, read_deviation)
    hidden_act: str = setting("silu", one_of_exactly(*ACTIVATIONS))
    partial_rotary_factor: float = setting(1.0, _read_part)
    rope_local_base_freq: float | None = setting(None, optional(read_base))
    nope_layers: tuple[int, ...] = setting((), read_layers)
    zero_centered_norms: bool = setting(False, read_flag)
    post_norms: bool = setting(False, read_flag)
    scale_embeddings: bool = setting(False, read_flag)
    query_pre_attn_scalar: float | None = setting(None, optional(read_positive))
    attn_logit_softcapping: float | None = setting(None, optional(read_positive))
    final_logit_softcapping: float | None = setting(None, optional(read_positive))
    rope_interleave: bool = setting(False, read_flag)
    qk_l2_norm: bool = setting(False, read_flag)
    attn_temperature_tuning: bool = setting(False, read_flag)
    floor_scale: int = setting(8192, read_size)
    attn_scale: float = setting(0.1, read_positive)
    attention_sinks: bool = setting(False, read_flag)
    attention_chunk_size: int | None = setting(None, optional(read_size))
    experts: ExpertsConfig | None = subsection(ExpertsConfig, absent=True)
    latent: LatentConfig | None = subsection(LatentConfig, absent=True)
    num_nextn_predict_layers: int = setting(0, read_count)
    dtype: Any = setting(None, read_float_dtype)
    shard_sequence: bool = setting(False, read_flag)
    sequence: OverSequence = setting("auto", one_of_exactly(*get_args(OverSequence)))
    family: str | None = setting(None, optional(one_of_exactly(*FAMILIES)), compare=False)

    def _complete(self) -> None:
        heads = self.num_attention_heads
        latent = self.latent
        size = self.hidden_size // heads if latent is None else latent.qk_rope_head_dim
        for name, default in {"num_key_value_heads": heads, "head_dim": size}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

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

    def check(self) -> Iterable[ConfigError]:
        """Refuse sizes and parts that contradict each other."""
        heads = self.num_attention_heads
        if self.head_dim < 1:
            rule = f"at least num_attention_heads={heads} without head_dim"
            yield self._wrong("hidden_size", rule, "A head has a dim or more")
        if heads % self.num_key_value_heads:
            rule = f"a divisor of num_attention_heads={heads}"
            repair = "Each of these heads serves an equal number of heads of queries"
            yield self._wrong("num_key_value_heads", rule, repair)
        if self.num_nextn_predict_layers and (self.scale_embeddings or self.zero_centered_norms):
            rule = "0 with scale_embeddings or zero_centered_norms"
            yield self._wrong("num_nextn_predict_layers", rule, "Leave it out")
        if self.experts is not None and self.hidden_act != "silu":
            yield self._wrong("hidden_act", "'silu' with experts", "Experts compute nothing else")
        yield from self._check_latent()
        yield from self._check_rotary()
        yield from self._check_layers()

    def _check_latent(self) -> Iterable[ConfigError]:
        latent = self.latent
        if latent is None:
            return
        if self.head_dim != latent.qk_rope_head_dim:
            rule = f"latent.qk_rope_head_dim={latent.qk_rope_head_dim} or None"
            yield self._wrong("head_dim", rule, "latent has the other sizes of a head")
        if self.num_key_value_heads != self.num_attention_heads:
            rule = f"num_attention_heads={self.num_attention_heads} with latent"
            yield self._wrong("num_key_value_heads", rule, "Each head has its own keys and values")
        for each in fields(self):
            if each.name in _NOT_LATENT and getattr(self, each.name) != each.default:
                repair = "Latent attention computes nothing of the kind"
                yield self._wrong(each.name, f"{each.default} with latent", repair)

    def _check_rotary(self) -> Iterable[ConfigError]:
        dims = self._rotated_dims
        scaling = self.rope_scaling
        if dims % 2 and dims == self.head_dim:
            yield self._wrong("head_dim", "even", "Positions turn pairs of dims")
        elif dims % 2 or dims == 0:
            rule = f"a share of an even number of the head_dim={self.head_dim} dims"
            yield self._wrong("partial_rotary_factor", rule, "Pairs are rotated")
        if dims <= 2 and scaling is not None and scaling.rope_type == "dynamic":
            yield self._wrong("head_dim", "> 2 with rope_type='dynamic'", "It is divided by D - 2")
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name, None)
            if factors is not None and len(factors) != dims // 2:
                rule = (
                    f"a scaling with one {name} for each of the {dims // 2} pairs of rotated dims"
                )
                yield self._wrong(
                    "rope_scaling", rule, "Copy the list from the model's config.json"
                )

    def _check_layers(self) -> Iterable[ConfigError]:
        count = self.num_hidden_layers
        dense = () if self.experts is None else self.experts.dense_layers
        for name, layers, rule in (
            ("experts", dense, "a mixture with dense_layers"),
            ("nope_layers", self.nope_layers, "a tuple of layers"),
        ):
            if any(layer >= count for layer in layers):
                rule += f" below num_hidden_layers={count}"
                yield self._wrong(name, rule, "Layers are counted from 0")
        kinds = self.layer_types
        if kinds is not None and len(kinds) != count:
            rule = f"None or one type for each of num_hidden_layers={count}"
            yield self._wrong("layer_types", rule, "Name them all, or leave it out")
        for name, kind in {"sliding_window": SLIDING, "attention_chunk_size": CHUNKED}.items():
            if getattr(self, name) is None and kind in (kinds or ()):
                yield self._wrong(name, f"given for layers of {kind!r}", "Pass it")


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
