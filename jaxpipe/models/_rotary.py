"""Rotary position embedding, and scaling of its angles for longer contexts than in training."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._numbers import as_number
from jaxpipe.errors import ConfigError, LayerError, nearest, shown

from ._rules import Rule, is_positive, is_size

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

_FACTORS = ("short_factor", "long_factor")
"""Fields with a factor for each pair of dims."""


@dataclass(frozen=True)
class RotaryScaling:
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

    rope_type: str
    factor: float = 0.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in _FACTORS:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if not isinstance(self.rope_type, str) or self.rope_type not in _REQUIRED:
            raise ConfigError(
                f"rope_parameters.rope_type must be one of default, {', '.join(_REQUIRED)}, but "
                f"got rope_type={shown(self.rope_type)}. Angles of other kinds are not known here: "
                "use another model."
            )
        for name, holds, rule, repair in self._rules():
            if not holds:
                raise ConfigError(
                    f"rope_parameters.{name} must be {rule} with rope_type={self.rope_type!r}, but "
                    f"got {name}={shown(getattr(self, name))}. {repair}"
                )

    def _rules(self) -> Iterator[Rule]:
        required = _REQUIRED[self.rope_type]
        optional = _OPTIONAL.get(self.rope_type, ())
        for field in fields(self):
            name = field.name
            value = getattr(self, field.name)
            # True equals 1.0, which is a default, but is no number.
            is_default = value == field.default and not isinstance(value, bool)
            if name in ("rope_type", "truncate") or (is_default and name not in required):
                continue
            yield (
                name,
                name in (*required, *optional),
                "left out",
                "Angles of that kind do not depend on it.",
            )
            rule = "given and > 0 in float32" if name in required else "> 0 in float32"
            if name in _FACTORS:
                is_right = isinstance(value, tuple) and all(map(is_positive, value))
                rule = "a list of numbers > 0 in float32"
            elif name == "original_max_position_embeddings":
                is_right = is_size(value)
            elif name in ("mscale", "mscale_all_dim"):
                is_right = is_positive(value) or as_number(value) == 0
                rule = ">= 0"  # 0 is as if it were left out
            else:
                is_right = is_positive(value)
            yield name, is_right, rule, "Copy it from the model's config.json."
        is_read = "truncate" in optional or self.truncate is True
        yield (
            "truncate",
            isinstance(self.truncate, bool) and is_read,
            "left out",
            "Only yarn has it: True or False.",
        )
        if self.rope_type == "llama3":
            is_ramp = self.low_freq_factor <= self.high_freq_factor
            yield (
                "high_freq_factor",
                is_ramp,
                f">= low_freq_factor={self.low_freq_factor}",
                "Copy both.",
            )

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
        known = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name not in known:
                guess = nearest(str(name), known)
                hint = f"Did you mean {guess}?" if guess else f"Known are {', '.join(known)}."
                raise ConfigError(
                    f"rope_parameters.{name}={shown(value)} is not a known key. {hint}"
                )
        return cls(**values)

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


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one kind of block.

    Attributes:
        dim: Number of dims of each head that are rotated, from the first.
        theta: Base of the wavelengths.
        scaling: Scaling of the wavelengths.
        interleave: Whether a pair consists of neighbouring dims. Otherwise it consists of the i-th
            dim of the first half and the i-th dim of the second half of the rotated dims.
    """

    dim: int
    theta: float
    scaling: RotaryScaling | None = None
    interleave: bool = False

    def __call__(self, positions: jax.Array, *heads: jax.Array) -> list[jax.Array]:
        """Rotate arrays `[B, T, N, D]` by the angles of positions, integers `[B or 1, T]`."""
        # In 16 bits, angles of large positions would be off by whole turns.
        wide: Any = np.promote_types(jnp.result_type(*heads), np.float32)
        cos, sin = rotary(positions, self.dim, self.theta, self.scaling, wide)
        return [rotate(x, cos, sin, interleave=self.interleave) for x in heads]


def rotary(
    positions: jax.Array,
    dim: int,
    theta: float,
    scaling: RotaryScaling | None = None,
    dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles of `positions`, `[B or 1, T]`, each `[B or 1, T, 1, D / 2]`."""
    # Constants computed by NumPy: XLA's powers differ in the last digits, and large positions
    # amplify the difference.
    freq = (
        _plain(theta, dim)
        if scaling is None
        else scaling.frequencies(theta, dim, positions.shape[1])
    )
    freq = jnp.asarray(freq, dtype).reshape(1, 1, 1, -1)
    angles = positions.astype(dtype)[:, :, None, None] * freq
    magnitude = 1.0 if scaling is None else scaling.magnitude()
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


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


def check_packed(scaling: RotaryScaling | None, length: int, segment_ids: Any) -> None:
    """Refuse packed texts if the angles of each depend on its own length."""
    if segment_ids is not None and scaling is not None and scaling.is_stretched(length):
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
