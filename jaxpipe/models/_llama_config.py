"""Configuration of the Llama decoder, and conversion from and to Hugging Face's `config.json`."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

import jax.numpy as jnp

from jaxpipe.errors import ConfigError
from jaxpipe.transformer import OverSequence
from jaxpipe.weights import Rename, Source

from ._experts_config import ExpertsConfig
from ._families import FAMILIES, FULL, SLIDING, Family
from ._huggingface import ConfigKeys
from ._llama_keys import SIZES, read_llama
from ._rotary import RotaryScaling
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
        layer_types: `"full_attention"` or `"sliding_attention"` for each layer. None means that all
            layers have the window.
        tie_word_embeddings: Whether the head shares the embedding table.
        attention_dropout: Dropout rate of attention probabilities.
        initializer_range: Standard deviation of initial weights.
        experts: The mixture of experts that replaces the feed-forward networks. None means no
            mixture.
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
    experts: ExpertsConfig | None = None
    dtype: Any = None
    shard_sequence: bool = False
    sequence: OverSequence = "auto"
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        can_divide = is_size(self.hidden_size) and is_size(self.num_attention_heads)
        size = self.hidden_size // self.num_attention_heads if can_divide else None
        for name, default in {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": size,
        }.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        check_fields(self, self._rules())

    @classmethod
    def from_huggingface(cls, source: Source) -> "LlamaConfig":
        """Read a `config.json` of one of the families that `family` can name.

        SmolLM is read as a Llama. Unknown keys are named in a warning.

        Args:
            source: The folder with the file, the file itself, or its contents. Missing keys get the
                defaults of `transformers`.

        Returns:
            The configuration.

        Raises:
            ConfigError: A key has a value that these layers do not support.
        """
        keys = ConfigKeys(
            source, {name: {**_COMPUTED, **family.computed} for name, family in FAMILIES.items()}
        )
        config = cls(**read_llama(keys, FAMILIES[keys.model_type]), family=keys.model_type)
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
        return self._as_family(name, max_position_embeddings)

    @property
    def names(self) -> tuple[Rename, ...]:
        """The names of the weights of blocks in Hugging Face's files."""
        return FAMILIES[self._nearest()[0]].names

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
        return (self.experts.shared_size > 0) == (family.mixture.shared_size is not None)

    def _lost(self, name: str) -> dict[str, Any]:
        """Return the fields that do not survive a round trip through a family's `config.json`."""
        again = LlamaConfig.from_huggingface(self._as_family(name, 1))._numbers()
        return {key: value for key, value in self._numbers().items() if again[key] != value}

    def _as_family(self, name: str, max_position_embeddings: int) -> dict[str, Any]:
        """Make a family's `config.json`; fields without a key are left out."""
        family, scaling = FAMILIES[name], self.rope_scaling
        found: dict[str, Any] = {
            **{
                "model_type": name,
                "architectures": [f"{family.classes}ForCausalLM"],
                "hidden_act": "silu",
            },
            **{key: getattr(self, key) for key in _SHARED},
            "max_position_embeddings": max_position_embeddings,
            **({} if scaling is None else {"rope_scaling": scaling.to_dict()}),
        }
        if scaling is not None and scaling.rope_type == "dynamic":  # this key gives its context
            found["max_position_embeddings"] = scaling.original_max_position_embeddings
        for key in ("out_bias", "qkv_bias", "mlp_bias"):
            flag = getattr(family, key)
            found |= {} if isinstance(flag, bool) else {flag[0]: getattr(self, key)}
        windows = [self.window(layer) for layer in range(self.num_hidden_layers)]
        if family.windows != "none":
            found["sliding_window"] = self.sliding_window if any(windows) else None
        if family.windows == "by_layer" and any(windows):
            found |= {
                "use_sliding_window": True,
                "layer_types": [SLIDING if window else FULL for window in windows],
            }
        if family.mixture is not None and self.experts is not None:
            found |= family.mixture.to_dict(self.experts)
        return found

    def _numbers(self) -> dict[str, Any]:
        """Return the fields that decide a trained model's results, in a canonical form."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        experts = self.experts
        if experts is not None:
            told["experts"] = replace(experts, capacity_factor=None, balance=0.0, z_loss=0.0)
            # If every layer has experts, nothing uses the width of other feed-forward networks.
            told["intermediate_size"] = self.intermediate_size if experts.dense_layers else None
        told["layer_types"] = [self.window(layer) for layer in range(self.num_hidden_layers)]
        return {
            name: value
            for name, value in told.items()
            if name not in ("dtype", "shard_sequence", "sequence", "sliding_window", "family")
        }

    def window(self, layer: int) -> int | None:
        """Return the number of positions that a query of a layer sees; None for all."""
        is_full = self.layer_types is not None and self.layer_types[layer] == FULL
        return None if is_full else self.sliding_window

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def _rules(self) -> Iterator[Rule]:
        yield from are_sizes(self, (*SIZES, "num_key_value_heads", "head_dim"))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        yield (
            *(
                "num_key_value_heads",
                heads % kv_heads == 0,
                f"a divisor of num_attention_heads={heads}",
            ),
            "Each of these heads serves an equal number of heads of queries.",
        )
        yield "head_dim", self.head_dim % 2 == 0, "even", "Positions turn pairs of dims."
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
            self.head_dim > 2 or not is_dynamic,
            "> 2 with rope_type='dynamic'",
            "It is divided by D - 2.",
        )
        window = self.sliding_window
        yield (
            "sliding_window",
            window is None or is_size(window),
            "an integer >= 1 or None",
            "It counts positions.",
        )
        yield from are_positive(self, ("rms_norm_eps",))
        yield from are_positive(self, ("rope_theta",), above=1.0)
        yield from are_deviations(self, ("initializer_range",))
        yield from are_shares(self, ("attention_dropout",))
        flags = (
            "qkv_bias",
            "out_bias",
            "mlp_bias",
            "qk_norm",
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
        kinds = self.layer_types
        is_listed = kinds is None or (
            isinstance(kinds, tuple) and len(kinds) == self.num_hidden_layers
        )
        rule = (
            f"None or one of {FULL!r} and {SLIDING!r} for each of "
            f"num_hidden_layers={self.num_hidden_layers}"
        )
        are_known = is_listed and all(kind in (FULL, SLIDING) for kind in kinds or ())
        yield "layer_types", are_known, rule, "Layers of other types are not known here."
        needs = SLIDING in (kinds or ())
        yield (
            "sliding_window",
            window is not None or not needs,
            f"given for layers of {SLIDING!r}",
            "Pass it.",
        )
        is_float = self.dtype is None or jnp.issubdtype(self.dtype, jnp.floating)
        yield "dtype", is_float, "a floating-point dtype or None", "Leave it out."
        is_known = self.family is None or self.family in FAMILIES
        yield "family", is_known, f"None or one of {', '.join(FAMILIES)}", "Leave it out."


_COMPUTED = {
    "hidden_act": ("silu",),
    **dict.fromkeys(("attention_bias", "mlp_bias", "output_router_logits"), (False,)),
    "router_jitter_noise": (0.0,),
}

_SHARED = (
    *SIZES,
    *(
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "attention_dropout",
    ),
    "initializer_range",
)
"""Fields that have the same key in every family."""
