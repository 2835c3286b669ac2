"""Configuration of the Llama decoder, and conversion from and to Hugging Face's `config.json`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from jaxpipe.config import (
    Collector,
    Section,
    one_of_exactly,
    optional,
    read_flag,
    read_whole,
    required,
    setting,
    subsection,
    wrong_value,
)
from jaxpipe.errors import ConfigError
from jaxpipe.models.transformer import OverSequence, read_float_dtype
from jaxpipe.weights import Source

from ._activations import ACTIVATIONS
from ._experts_config import ExpertsConfig
from ._families import FAMILIES, Family
from ._huggingface import ConfigKeys
from ._latent_config import LatentConfig
from ._llama_keys import made_of, read_llama, read_text, values_of, write_llama
from ._parts import CHUNKED, PARTS, SLIDING, BlockKind, Heads, LayerPattern, Norms
from ._readers import read_count, read_deviation, read_positive, read_share, read_size
from ._rotary import Rotary


def _read_attention(value: object, path: str) -> Heads | LatentConfig:
    if isinstance(value, Mapping):
        return read_whole(LatentConfig if "kv_lora_rank" in value else Heads, value)
    if not isinstance(value, Heads | LatentConfig):
        raise wrong_value(path, "a Heads or LatentConfig", value, "Make it of jaxpipe.models")
    return value


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
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the feed-forward network has biases.
        tie_word_embeddings: Whether the head shares the embedding table.
        attention_dropout: Dropout rate of attention probabilities.
        initializer_range: Standard deviation of initial weights.
        hidden_act: Activation of the gate of feed-forward networks that are not mixtures: `"silu"`,
            `"gelu"`, `"gelu_pytorch_tanh"`, `"gelu_new"` or `"relu"`.
        scale_embeddings: Whether embeddings are multiplied by sqrt(H), rounded to their dtype.
        final_logit_softcapping: Logits become `cap * tanh(logits / cap)` with this cap. None means
            that they are not capped.
        attention: What ordinary heads compute, or the sizes of multi-head latent attention, with
            which `head_dim` is `qk_rope_head_dim`, as in `transformers`.
        rotary: The rotary embedding.
        pattern: What differs from layer to layer, such as windows.
        norms: The norms.
        experts: The mixture of experts that replaces the feed-forward networks. None means no
            mixture.
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
    qkv_bias: bool = setting(False, read_flag)
    out_bias: bool = setting(False, read_flag)
    mlp_bias: bool = setting(False, read_flag)
    tie_word_embeddings: bool = setting(False, read_flag)
    attention_dropout: float = setting(0.0, read_share)
    initializer_range: float = setting(0.02, read_deviation)
    hidden_act: str = setting("silu", one_of_exactly(*ACTIVATIONS))
    scale_embeddings: bool = setting(False, read_flag)
    final_logit_softcapping: float | None = setting(None, optional(read_positive))
    attention: Heads | LatentConfig = setting(Heads(), _read_attention)
    rotary: Rotary = subsection(Rotary)
    pattern: LayerPattern = subsection(LayerPattern)
    norms: Norms = subsection(Norms)
    experts: ExpertsConfig | None = subsection(ExpertsConfig, absent=True)
    num_nextn_predict_layers: int = setting(0, read_count)
    dtype: Any = setting(None, read_float_dtype)
    shard_sequence: bool = setting(False, read_flag)
    sequence: OverSequence = setting("auto", one_of_exactly(*get_args(OverSequence)))
    family: str | None = setting(None, optional(one_of_exactly(*FAMILIES)), compare=False)

    def _complete(self) -> None:
        heads = self.num_attention_heads
        size = self.hidden_size // heads
        if isinstance(self.attention, LatentConfig):
            size = self.attention.qk_rope_head_dim
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
        sections = (*PARTS.values(), cls)
        defaults = {each.name: each.default for section in sections for each in fields(section)}
        found = read_llama(keys, FAMILIES[keys.model_type], defaults)
        errors = Collector()
        parts: dict[str, Any] = {}
        for name, part in PARTS.items():
            with errors.catch():
                parts[name] = made_of(part, found)
        with errors.catch(compares=True):
            config = made_of(cls, {**parts, **found, "family": keys.model_type})
        errors.raise_all()
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
    def nearest_family(self) -> Family:
        """The family whose files the weights are named for."""
        return FAMILIES[self._nearest()[0]]

    def _nearest(self) -> tuple[str, dict[str, Any]]:
        """Return the family that represents this best, and the fields that it cannot represent."""
        if self.family is not None:
            return self.family, self._lost(self.family)
        # Families that have experts, and a shared one, exactly if this configuration does: others
        # have no names for them.
        has_shared = None if self.experts is None else self.experts.shared_size > 0
        lost = {
            name: self._lost(name)
            for name, family in FAMILIES.items()
            if getattr(family.mixture, "has_shared", None) == has_shared
        }
        return min(lost.items(), key=lambda item: len(item[1]))

    def _lost(self, name: str) -> dict[str, Any]:
        """Return the fields that do not survive a round trip through a family's `config.json`."""
        written = write_llama(self, name, FAMILIES[name], 1)
        try:
            again = LlamaConfig.from_huggingface(written)._computed()
        except ConfigError:  # a family without the fields that others depend on
            again = {}
        values = values_of(self)
        return {
            name: values[name] for name, each in self._computed().items() if again.get(name) != each
        }

    def _computed(self) -> dict[str, Any]:
        """Return what decides results, by field: of parts, what each block has."""
        found = values_of(self)
        kinds = [self.kind(layer) for layer in range(self.num_hidden_layers)]
        blocks = [
            {
                **vars(kind.rotary or self.rotary),
                **vars(kind.attention),
                "nope_layers": kind.rotary is None,
                "sliding_window": kind.window,
                "attention_chunk_size": kind.chunk,
            }
            for kind in kinds
        ]
        found |= {name: [block[name] for block in blocks] for name in blocks[0]}
        if self.experts is not None:
            found["experts"] = replace(self.experts, capacity_factor=None, balance=0.0, z_loss=0.0)
        if all(kind.experts for kind in kinds):
            del found["intermediate_size"]
        return {name: value for name, value in found.items() if name not in _NOT_COMPUTED}

    def kind(self, layer: int) -> BlockKind:
        """Return the parts of the block of a layer, counted from 0."""
        pattern = self.pattern
        kind = pattern.kind(layer)
        rotary = pattern.rotary(layer, self.rotary)
        attention = self.attention
        if isinstance(attention, Heads):
            attention = attention.in_block(self.head_dim, is_rotated=rotary is not None)
        experts = self.experts
        return BlockKind(
            attention,
            pattern.sliding_window if kind == SLIDING else None,
            pattern.attention_chunk_size if kind == CHUNKED else None,
            rotary,
            None if experts is None or layer in experts.dense_layers else experts,
        )

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
        if self.num_nextn_predict_layers and (
            self.scale_embeddings or self.norms.zero_centered_norms
        ):
            rule = "0 with scale_embeddings or zero_centered_norms"
            yield self._wrong("num_nextn_predict_layers", rule, "Leave it out")
        if self.experts is not None and self.hidden_act != "silu":
            yield self._wrong("hidden_act", "'silu' with experts", "Experts compute nothing else")
        if isinstance(self.attention, LatentConfig):
            yield from self._check_latent(self.attention)
        yield from self.rotary.misfits(self.head_dim)
        yield from self.pattern.misfits(self.num_hidden_layers)
        dense = () if self.experts is None else self.experts.dense_layers
        if any(layer >= self.num_hidden_layers for layer in dense):
            rule = f"a mixture with dense_layers below num_hidden_layers={self.num_hidden_layers}"
            yield self._wrong("experts", rule, "Layers are counted from 0")

    def _check_latent(self, latent: LatentConfig) -> Iterable[ConfigError]:
        if self.head_dim != latent.qk_rope_head_dim:
            rule = f"attention.qk_rope_head_dim={latent.qk_rope_head_dim} or None"
            yield self._wrong("head_dim", rule, "attention has the other sizes of a head")
        if self.num_key_value_heads != self.num_attention_heads:
            rule = f"num_attention_heads={self.num_attention_heads} with latent attention"
            yield self._wrong("num_key_value_heads", rule, "Each head has its own keys and values")
        repair = "Latent attention computes nothing of the kind"
        if self.rotary.partial_rotary_factor != 1.0:
            yield self.rotary._wrong("partial_rotary_factor", "1.0 with latent attention", repair)
        if self.pattern.attention_chunk_size is not None:
            yield self.pattern._wrong("attention_chunk_size", "None with latent attention", repair)


_NOT_COMPUTED = (
    "dtype",
    "shard_sequence",
    "sequence",
    "layer_types",
    "rope_local_base_freq",
    "family",
)
"""Fields that decide no results, or only what blocks have."""

_COMPUTED = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "output_router_logits"), (False,)),
    "router_jitter_noise": (0.0,),
}
