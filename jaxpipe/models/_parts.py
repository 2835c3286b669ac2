"""Parts of a decoder's configuration: each belongs to one part of a block, and checks itself."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxpipe.config import Section, list_of, one_of_exactly, optional, read_flag, setting
from jaxpipe.errors import ConfigError

from ._experts_config import ExpertsConfig
from ._latent_config import LatentConfig
from ._readers import read_base, read_layers, read_positive, read_size
from ._rotary import Rotary

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
"""Names in `layer_types` of layers that see all earlier positions, a window of them, or a chunk."""


@dataclass(frozen=True)
class Heads(Section):
    """Attention with ordinary heads, with Hugging Face's names where they exist.

    Attributes:
        qk_norm: Whether each head of queries and keys is normalised before the rotary embedding.
        qk_l2_norm: Whether each head of queries and keys is normalised after the rotary embedding,
            without scales, in layers that have one.
        query_pre_attn_scalar: Scores are multiplied by its inverse square root. None means the size
            of a head.
        attn_logit_softcapping: Scores become `cap * tanh(scores / cap)` with this cap. None means
            that they are not capped.
        attention_sinks: Whether each head of queries has a learned score that takes part in the
            softmax, but has no value.
        attn_temperature_tuning: Whether queries of layers without a rotary embedding are multiplied
            by `1 + attn_scale * log(1 + floor((position + 1) / floor_scale))`.
        floor_scale: See `attn_temperature_tuning`.
        attn_scale: See `attn_temperature_tuning`.

    Raises:
        ConfigError: A value has a wrong type or is out of range.
    """

    qk_norm: bool = setting(False, read_flag)
    qk_l2_norm: bool = setting(False, read_flag)
    query_pre_attn_scalar: float | None = setting(None, optional(read_positive))
    attn_logit_softcapping: float | None = setting(None, optional(read_positive))
    attention_sinks: bool = setting(False, read_flag)
    attn_temperature_tuning: bool = setting(False, read_flag)
    floor_scale: int = setting(8192, read_size)
    attn_scale: float = setting(0.1, read_positive)

    def in_block(self, head_dim: int, *, is_rotated: bool) -> "Heads":
        """Return what takes effect in a block, with numbers for what follows from the others."""
        found = replace(self, query_pre_attn_scalar=self.query_pre_attn_scalar or head_dim)
        if self.attn_temperature_tuning and not is_rotated:
            return found
        names = "attn_temperature_tuning", "floor_scale", "attn_scale"
        return replace(found, **{name: getattr(Heads, name) for name in names})


@dataclass(frozen=True)
class LayerPattern(Section):
    """What differs from layer to layer, with Hugging Face's names where they exist.

    Attributes:
        sliding_window: Number of positions that a query sees, including its own, in layers with a
            window. None means all.
        layer_types: `"full_attention"`, `"sliding_attention"` or `"chunked_attention"` for each
            layer. None means that all layers have the window.
        attention_chunk_size: Number of positions of a chunk in layers with chunks. A query sees
            only positions of its own chunk.
        nope_layers: Layers, counted from 0, whose queries and keys are not rotated.
        rope_local_base_freq: Base of the wavelengths in layers with a window, which are not scaled.
            None means that they are rotated like the others.

    Raises:
        ConfigError: A value has a wrong type, is out of range, or is missing for `layer_types`.
    """

    sliding_window: int | None = setting(None, optional(read_size))
    layer_types: tuple[str, ...] | None = setting(
        None, optional(list_of(one_of_exactly(FULL, SLIDING, CHUNKED)))
    )
    attention_chunk_size: int | None = setting(None, optional(read_size))
    nope_layers: tuple[int, ...] = setting((), read_layers)
    rope_local_base_freq: float | None = setting(None, optional(read_base))

    def check(self) -> Iterable[ConfigError]:
        """Refuse layers whose size is not given."""
        for name, kind in {"sliding_window": SLIDING, "attention_chunk_size": CHUNKED}.items():
            if getattr(self, name) is None and kind in (self.layer_types or ()):
                yield self._wrong(name, f"given for layers of {kind!r}", "Pass it")

    def misfits(self, num_layers: int) -> Iterable[ConfigError]:
        """Refuse what does not fit a number of layers."""
        if any(layer >= num_layers for layer in self.nope_layers):
            rule = f"a tuple of layers below num_hidden_layers={num_layers}"
            yield self._wrong("nope_layers", rule, "Layers are counted from 0")
        if self.layer_types is not None and len(self.layer_types) != num_layers:
            rule = f"None or one type for each of num_hidden_layers={num_layers}"
            yield self._wrong("layer_types", rule, "Name them all, or leave it out")

    def kind(self, layer: int) -> str:
        """Return the type of a layer, counted from 0."""
        if self.layer_types is None:
            return FULL if self.sliding_window is None else SLIDING
        return self.layer_types[layer]

    def rotary(self, layer: int, rotary: Rotary) -> Rotary | None:
        """Return the rotary embedding of a layer; `rotary` is that of most."""
        if layer in self.nope_layers:
            return None
        if self.rope_local_base_freq is None or self.kind(layer) != SLIDING:
            return rotary
        return replace(rotary, rope_theta=self.rope_local_base_freq, rope_scaling=None)


@dataclass(frozen=True)
class Norms(Section):
    """Norms of a decoder, with Hugging Face's names where they exist.

    Attributes:
        rms_norm_eps: Added to the mean of squares.
        zero_centered_norms: Whether norms multiply by 1 + scale instead of scale.
        post_norms: Whether the results of attention and feed-forward network are also normalised,
            before they are added to the residual stream.

    Raises:
        ConfigError: A value has a wrong type or is out of range.
    """

    rms_norm_eps: float = setting(1e-6, read_positive)
    zero_centered_norms: bool = setting(False, read_flag)
    post_norms: bool = setting(False, read_flag)


@dataclass(frozen=True)
class BlockKind:
    """The parts of a block that may differ from those of other blocks of the same model.

    Attributes:
        attention: The attention, with all numbers.
        window: Number of positions that a query sees, including its own. None means all earlier
            positions.
        chunk: Number of positions of a chunk. A query sees only earlier positions of its own chunk.
            None means that a text is not divided into chunks.
        rotary: The rotary embedding. None means that queries and keys are not rotated.
        experts: The mixture of experts. None means an ordinary feed-forward network.
    """

    attention: Heads | LatentConfig
    window: int | None = None
    chunk: int | None = None
    rotary: Rotary | None = None
    experts: ExpertsConfig | None = None


PARTS = {"rotary": Rotary, "attention": Heads, "pattern": LayerPattern, "norms": Norms}
"""Parts of a `LlamaConfig` that every decoder has, by field. Names of all their fields differ."""
