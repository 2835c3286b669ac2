"""Rotary position embedding, and scaling of its angles for longer contexts than in training."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import (
    Section,
    list_of,
    one_of_exactly,
    optional,
    read_flag,
    read_whole,
    required,
    setting,
    subsection,
    wrong_value,
)
from jaxpipe.errors import ConfigError, LayerError

from ._readers import LEAST, read_base, read_count, read_deviation, read_positive

_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
"""Required fields of each kind of scaling."""

_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
"""Optional fields of each kind of scaling."""

_read_kind = one_of_exactly(
    *_REQUIRED, repair="Angles of other kinds are not known here: use another model"
)
_read_factors = optional(list_of(read_positive, "a list of numbers"))


@dataclass(frozen=True)
class RotaryScaling(Section):
    """Scaling of the rotary embedding for longer contexts than in training.

    Fields have the names of Hugging Face's `rope_parameters`.

    Attributes:
        rope_type: `"linear"` divides all angles by `factor`. `"dynamic"` increases the base for
            sequences longer than `original_max_position_embeddings`; it uses the length and not the
            positions, so a sample's angles do not depend on other samples. `"llama3"` divides the
            frequencies of waves longer than the original context by `factor`, with a ramp between
            `low_freq_factor` and `high_freq_factor`. `"yarn"` is similar, with a ramp over dims
            and scaled scores. `"longrope"` divides each frequency by its own factor:
            `long_factor` for sequences longer than `original_max_position_embeddings`, otherwise
            `short_factor`.
        factor: Ratio of the new context length to the original one.
        original_max_position_embeddings: The original context length.
        low_freq_factor: Waves longer than the original context divided by this are slowed down by
            `factor`.
        high_freq_factor: Waves shorter than the original context divided by this are unchanged.
        beta_fast: Dims with at least this many turns in the original context are unchanged.
        beta_slow: Dims with at most this many turns are slowed down by `factor`.
        attention_factor: Factor of cosine and sine. None computes it from `factor`, as in the
            paper.
        mscale: Together with `mscale_all_dim`, another way to set `attention_factor`.
        mscale_all_dim: See `mscale`.
        truncate: Whether the ramp's ends are rounded to whole dims.
        short_factor: A factor for each pair of dims, in short sequences.
        long_factor: The same in long sequences.

    Raises:
        ConfigError: The kind is not one of these, or a field is missing or does not belong to it.

    Reference:
        Peng et al., "YaRN" (2023); Dubey et al., "The Llama 3 herd of models" (2024); Ding et al.,
        "LongRoPE" (2024).
    """

    path: ClassVar[str] = "rope_parameters"

    rope_type: str = required(_read_kind)
    factor: float = setting(0.0, read_deviation)
    original_max_position_embeddings: int = setting(0, read_count)
    low_freq_factor: float = setting(0.0, read_deviation)
    high_freq_factor: float = setting(0.0, read_deviation)
    beta_fast: float = setting(32.0, read_positive)
    beta_slow: float = setting(1.0, read_positive)
    attention_factor: float | None = setting(None, optional(read_positive))
    mscale: float | None = setting(None, optional(read_deviation))
    mscale_all_dim: float | None = setting(None, optional(read_deviation))
    truncate: bool = setting(True, read_flag)
    short_factor: tuple[float, ...] | None = setting(None, _read_factors)
    long_factor: tuple[float, ...] | None = setting(None, _read_factors)

    def check(self) -> Iterable[ConfigError]:
        """Refuse fields that are missing, or that the kind does not have."""
        needed = _REQUIRED[self.rope_type]
        known = ("rope_type", *needed, *_OPTIONAL.get(self.rope_type, ()))
        kind = f"with rope_type={self.rope_type!r}"
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in known and value != each.default:
                repair = "Angles of that kind do not depend on it"
                yield self._wrong(each.name, f"left out {kind}", repair)
            # Smaller numbers are flushed to zero.
            is_given = each.name not in needed or (
                value >= LEAST if isinstance(value, float | int) else value is not None
            )
            if not is_given:
                repair = "Copy it from the model's config.json"
                yield self._wrong(each.name, f"given and > 0 {kind}", repair)
        if self.low_freq_factor > self.high_freq_factor:
            rule = f">= low_freq_factor={self.low_freq_factor}"
            yield self._wrong("high_freq_factor", rule, "Copy both")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RotaryScaling":
        """Make a scaling from a dictionary.

        Args:
            values: The fields.

        Returns:
            The scaling.

        Raises:
            ConfigError: There is an unknown key, or the fields are invalid.
        """
        return read_whole(cls, values)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `rope_scaling` in a `config.json`."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        told = {name: value for name, (value, default) in values.items() if value != default}
        if self.rope_type in ("linear", "dynamic"):
            # `dynamic` takes it from `max_position_embeddings`, and `linear` needs none.
            told.pop("original_max_position_embeddings", None)
        return told

    @property
    def uses_length(self) -> bool:
        """Whether angles depend on the length of the text."""
        return self.rope_type in ("dynamic", "longrope")

    def is_stretched(self, length: int) -> bool:
        """Whether a sequence is so long that its angles depend on its length."""
        return self.uses_length and length > self.original_max_position_embeddings

    def frequencies(self, theta: float, dim: int, length: int) -> np.ndarray:
        """Return the angle per position of each pair of dims."""
        if self.rope_type == "dynamic":
            excess = max(length / self.original_max_position_embeddings, 1.0)
            theta *= (self.factor * excess - (self.factor - 1)) ** (dim / (dim - 2))
        freq = _plain(theta, dim)
        if self.rope_type == "dynamic":
            return freq
        if self.rope_type == "linear":
            return freq / np.float32(self.factor)
        if self.rope_type == "longrope":
            factors = self.long_factor if self.is_stretched(length) else self.short_factor
            return freq / np.asarray(factors, np.float32)
        if self.rope_type == "llama3":
            turns = self.original_max_position_embeddings * freq / (2 * math.pi)
            width = self.high_freq_factor - self.low_freq_factor
            above = turns - self.low_freq_factor
            unscaled = np.clip(above / width, 0, 1) if width else (above > 0).astype(freq.dtype)
        else:
            low, high = (
                self._dim_with_turns(turns, theta, dim)
                for turns in (self.beta_fast, self.beta_slow)
            )
            if self.truncate:
                low = math.floor(low)
                high = math.ceil(high)
            low = max(low, 0)
            high = min(high, dim - 1)
            # No ramp of width 0, as in `transformers`.
            ramp = (np.arange(dim // 2, dtype=np.float32) - low) / (high - low or 0.001)
            unscaled = 1 - np.clip(ramp, 0, 1)
        return (freq * unscaled + freq / self.factor * (1 - unscaled)).astype(np.float32)

    def magnitude(self) -> float:
        """The factor of cosine and sine; scores grow with its square."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            growth = math.log(max(self.factor, 1.0))
            return math.sqrt(1 + growth / math.log(self.original_max_position_embeddings))

        def scale(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale(1.0)

    def _dim_with_turns(self, turns: float, theta: float, dim: int) -> float:
        """Return the dim that makes this many turns in the original context."""
        return (
            dim
            * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )


def _read_part(value: object, path: str) -> float:
    part = read_positive(value, path)
    if part > 1:
        raise wrong_value(path, "in (0, 1]", value, "Use 1.0 to rotate all dims")
    return part


@dataclass(frozen=True)
class Rotary(Section):
    """The rotary embedding, with Hugging Face's names where they exist.

    Attributes:
        rope_theta: Base of the wavelengths.
        rope_scaling: Scaling of the wavelengths for longer contexts.
        partial_rotary_factor: Share of a head's dims that are rotated, from the first.
        rope_interleave: Whether positions rotate pairs of neighbouring dims. Otherwise, a pair
            consists of the i-th dim of the first half and of the second half of the rotated dims.

    Raises:
        ConfigError: A value has a wrong type or is out of range.
    """

    rope_theta: float = setting(10000.0, read_base)
    rope_scaling: RotaryScaling | None = subsection(RotaryScaling, absent=True)
    partial_rotary_factor: float = setting(1.0, _read_part)
    rope_interleave: bool = setting(False, read_flag)

    def __call__(
        self, positions: jax.Array, segment_ids: jax.Array | None, *heads: jax.Array
    ) -> list[jax.Array]:
        """Rotate arrays `[B, T, N, D]` by the angles of positions, integers `[B or 1, T]`."""
        scaling = self.rope_scaling
        length = positions.shape[1]
        dim = self.num_dims(heads[0].shape[-1])
        # In 16 bits, angles of large positions would be off by whole turns.
        wide: Any = np.promote_types(jnp.result_type(*heads), np.float32)
        magnitude = 1.0
        # Constants computed by NumPy: XLA's powers differ in the last digits, and large positions
        # amplify the difference.
        if scaling is None:
            freq = _plain(self.rope_theta, dim)
        else:
            _check_packed(scaling, length, segment_ids)
            freq = scaling.frequencies(self.rope_theta, dim, length)
            magnitude = scaling.magnitude()
        freq = jnp.asarray(freq, wide).reshape(1, 1, 1, -1)
        angles = positions.astype(wide)[:, :, None, None] * freq
        cos = jnp.cos(angles) * magnitude
        sin = jnp.sin(angles) * magnitude
        return [rotate(x, cos, sin, interleave=self.rope_interleave) for x in heads]

    def num_dims(self, head_dim: int) -> int:
        """Return the number of dims of a head that are rotated."""
        return int(head_dim * self.partial_rotary_factor)

    def misfits(self, head_dim: int) -> Iterable[ConfigError]:
        """Refuse what does not fit heads of a size."""
        dims = self.num_dims(head_dim)
        scaling = self.rope_scaling
        if dims % 2 and dims == head_dim:
            yield wrong_value("head_dim", "even", head_dim, "Positions turn pairs of dims")
        elif dims % 2 or dims == 0:
            rule = f"a share of an even number of the head_dim={head_dim} dims"
            yield self._wrong("partial_rotary_factor", rule, "Pairs are rotated")
        if dims <= 2 and scaling is not None and scaling.rope_type == "dynamic":
            rule = "> 2 with rope_type='dynamic'"
            yield wrong_value("head_dim", rule, head_dim, "It is divided by D - 2")
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name, None)
            if factors is not None and len(factors) != dims // 2:
                rule = (
                    f"a scaling with one {name} for each of the {dims // 2} pairs of rotated dims"
                )
                yield self._wrong(
                    "rope_scaling", rule, "Copy the list from the model's config.json"
                )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleave: bool = False) -> jax.Array:
    """Rotate the first dims of `[B, T, N, D]`, in pairs, as many as there are angles."""
    size = 2 * cos.shape[-1]
    # In the dtype of the angles, which is wider than 16 bits; the result is rounded once.
    turned = x[..., :size].astype(cos.dtype)
    rest = x[..., size:]
    if interleave:
        first = turned[..., ::2]
        second = turned[..., 1::2]
    else:
        first, second = jnp.split(turned, 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = (
        jnp.stack(parts, axis=-1).reshape(turned.shape)
        if interleave
        else jnp.concatenate(parts, axis=-1)
    ).astype(x.dtype)
    return turned if rest.shape[-1] == 0 else jnp.concatenate([turned, rest], axis=-1)


def _check_packed(scaling: RotaryScaling, length: int, segment_ids: Any) -> None:
    """Refuse packed texts if the angles of each depend on its own length."""
    if segment_ids is not None and scaling.is_stretched(length):
        raise LayerError(
            "packed texts together must not be longer than the context at which "
            f"rope_type={scaling.rope_type!r} begins to stretch, because the angles of a text "
            f"depend on its own length, but got segment_ids for {length} positions and "
            f"original_max_position_embeddings={scaling.original_max_position_embeddings}. Pack "
            "fewer texts."
        )


def _plain(theta: float, dim: int) -> np.ndarray:
    return (
        np.float32(theta) ** -(np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    ).astype(np.float32)
