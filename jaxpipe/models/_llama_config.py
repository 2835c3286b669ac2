"""Sizes and switches of the Llama decoder, and how they are read from Hugging Face's `config.json`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp

from jaxpipe.errors import ConfigError
from jaxpipe.weights import Source

from ._experts import ExpertsConfig
from ._huggingface import ConfigKeys, check_value, wrong
from ._rotary import RotaryScaling
from ._rules import Rule, are_deviations, are_flags, are_positive, are_shares, are_sizes, check_fields, is_size

FULL, SLIDING = "full_attention", "sliding_attention"

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a decoder, by Hugging Face's names where it has them.

    Attributes:
        vocab_size: Number V of tokens.
        hidden_size: Width H of the residual stream.
        intermediate_size: Width of the feed-forward part, where it is no mixture.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Heads N of queries.
        num_key_value_heads: Heads K of keys and values, which divides N. None: N.
        head_dim: Size D of a head. None: H / N.
        rms_norm_eps: Added to the mean of squares in norms.
        rope_theta: Base of the wavelengths of rotary positions.
        rope_scaling: Changes these wavelengths.
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: Whether the attention's output has one.
        mlp_bias: Whether the feed-forward part has them.
        qk_norm: Whether each head of queries and keys is normalised before it is turned.
        sliding_window: How many positions a query sees, its own included, in layers with a window. None: all.
        layer_types: For each layer `"full_attention"` or `"sliding_attention"`. None: each has the window.
        tie_word_embeddings: Whether the head is the embedding's table.
        attention_dropout: Share of the attention's probabilities that training drops.
        initializer_range: Standard deviation of initial weights.
        experts: The mixture of experts that blocks have as their feed-forward part. None: they have none.
        dtype: What layers compute in. None: the dtype of weights and inputs, which a pipeline's `compute_dtype` sets.
        shard_sequence: Whether the residual stream between products is divided over the mesh axis `model` along the
            positions, where that divides them.

    Raises:
        ConfigError: A value is of a wrong type or range, or contradicts another.

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

    def __post_init__(self) -> None:
        can_divide = is_size(self.hidden_size) and is_size(self.num_attention_heads)
        size = self.hidden_size // self.num_attention_heads if can_divide else None
        for name, default in {"num_key_value_heads": self.num_attention_heads, "head_dim": size}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if isinstance(self.layer_types, list):
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        check_fields(self, self._rules())

    @classmethod
    def from_huggingface(cls, source: Source) -> "LlamaConfig":
        """Read a `config.json` of Llama, Mistral, Mixtral, Qwen 2, 2.5 or 3 or their mixtures, SmolLM or SmolLM 2.

        Args:
            source: The folder that holds it, the file, or its contents. What a key has no value for is as
                `transformers` has it.

        Raises:
            ConfigError: A key has a value that these layers do not compute. Keys that are not known are named in a
                warning.
        """
        keys = ConfigKeys(source, dict.fromkeys(_CLASSES, _COMPUTED))
        family = keys.model_type
        sizes = {name: keys.size(name) for name in _SIZES}
        keys.size("max_position_embeddings", 1)  # read with `rope_scaling`
        theta, scaling = _rotary(keys)
        has_bias = keys.flag("attention_bias", False) if family in ("llama", "qwen3", "qwen3_moe") else False
        has_qkv_bias = keys.flag("qkv_bias", True) if family == "qwen2_moe" else has_bias or family == "qwen2"
        keys.check("qkv_bias", has_qkv_bias)
        for key in ("qk_norm", "use_qk_norm"):
            keys.check(key, family in ("qwen3", "qwen3_moe"))
        config = cls(
            **sizes,
            num_key_value_heads=keys.get("num_key_value_heads", _KEY_HEADS.get(family)),
            head_dim=keys.get("head_dim", 128 if family == "qwen3" else None),
            rms_norm_eps=keys.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=has_qkv_bias,
            out_bias=has_bias,
            mlp_bias=keys.flag("mlp_bias", False) if family == "llama" else False,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            **_windows(keys),
            tie_word_embeddings=keys.get("tie_word_embeddings", False),
            attention_dropout=keys.get("attention_dropout", 0.0),
            initializer_range=keys.get("initializer_range", 0.02),
            experts=_experts(keys),
        )
        keys.finish()
        return config

    def to_huggingface(self, max_position_embeddings: int) -> dict[str, Any]:
        """The contents of a `config.json`, which `from_huggingface` reads back; for `save_huggingface`.

        The family is the one whose model computes what this does: `"llama"` where several do.

        Args:
            max_position_embeddings: The longest sequence that the model was trained for.

        Raises:
            ConfigError: No family of `transformers` computes this.
        """
        family = self._family()
        windows = [self.window(layer) for layer in range(self.num_hidden_layers)]
        shared = [field.name for field in fields(self) if field.name in _SHARED]
        found: dict[str, Any] = {
            **{"model_type": family, "architectures": [f"{_CLASSES[family]}ForCausalLM"], "hidden_act": "silu"},
            **{name: getattr(self, name) for name in shared},
            "max_position_embeddings": max_position_embeddings,
            **({} if self.rope_scaling is None else {"rope_scaling": _scaling_of(self.rope_scaling)}),
            **({} if self.experts is None else _experts_of(family, self.experts)),
        }
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic":  # it has the context from here
            found["max_position_embeddings"] = self.rope_scaling.original_max_position_embeddings
        if family in ("llama", "qwen3", "qwen3_moe"):
            found["attention_bias"] = self.qkv_bias
        if family == "llama":
            found["mlp_bias"] = self.mlp_bias
        elif family in ("qwen2", "qwen3") and any(windows):
            kinds = [SLIDING if window else FULL for window in windows]
            found |= {"use_sliding_window": True, "sliding_window": self.sliding_window, "layer_types": kinds}
        else:
            found["sliding_window"] = self.sliding_window if any(windows) else None
        again = LlamaConfig.from_huggingface(found)
        lost = {name: value for name, value in self._numbers().items() if again._numbers()[name] != value}
        if lost:
            listed = ", ".join(f"{name}={value!r}" for name, value in lost.items())
            raise ConfigError(
                f"a configuration must be that of a family of transformers, but got {listed}, which {family}, the "
                "nearest, has not. Write the weights with export_safetensors, for layers of your own."
            )
        return found

    def _family(self) -> str:
        """The family that may compute this."""
        if self.experts is not None:
            return "qwen3_moe" if self.qk_norm else "qwen2_moe" if self.qkv_bias else "mixtral"
        if self.qk_norm:
            return "qwen3"
        if self.qkv_bias and not self.out_bias:
            return "qwen2"
        return "mistral" if any(self.window(layer) for layer in range(self.num_hidden_layers)) else "llama"

    def _numbers(self) -> dict[str, Any]:
        """The fields that decide which numbers a trained model gives, each fact in one form."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        experts = self.experts
        if experts is not None:
            told["experts"] = replace(experts, capacity_factor=None, balance=0.0)
            # Where each layer has experts, the width of others is that of nobody.
            told["intermediate_size"] = self.intermediate_size if experts.dense_layers else None
        told["layer_types"] = [self.window(layer) for layer in range(self.num_hidden_layers)]
        return {
            name: value for name, value in told.items() if name not in ("dtype", "shard_sequence", "sliding_window")
        }

    def window(self, layer: int) -> int | None:
        """Number of positions that a query of a layer sees; None for all."""
        is_full = self.layer_types is not None and self.layer_types[layer] == FULL
        return None if is_full else self.sliding_window

    def is_mixture(self, layer: int) -> bool:
        """True if a layer has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def _rules(self) -> Iterator[Rule]:
        yield from are_sizes(self, (*_SIZES, "num_key_value_heads", "head_dim"))
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        yield (
            *("num_key_value_heads", heads % kv_heads == 0, f"a divisor of num_attention_heads={heads}"),
            "Each of these heads serves an equal number of heads of queries.",
        )
        yield "head_dim", self.head_dim % 2 == 0, "even", "Positions turn pairs of dims."
        is_scaling = self.rope_scaling is None or isinstance(self.rope_scaling, RotaryScaling)
        yield "rope_scaling", is_scaling, "a RotaryScaling or None", "Make one with RotaryScaling.from_dict."
        is_dynamic = self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic"
        yield "head_dim", self.head_dim > 2 or not is_dynamic, "> 2 with rope_type='dynamic'", "It is divided by D - 2."
        window = self.sliding_window
        yield "sliding_window", window is None or is_size(window), "an integer >= 1 or None", "It counts positions."
        yield from are_positive(self, ("rms_norm_eps",))
        yield from are_positive(self, ("rope_theta",), above=1.0)
        yield from are_deviations(self, ("initializer_range",))
        yield from are_shares(self, ("attention_dropout",))
        flags = ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tie_word_embeddings", "shard_sequence")
        yield from are_flags(self, flags)
        dense = () if self.experts is None else self.experts.dense_layers
        are_there = all(layer < self.num_hidden_layers for layer in dense)
        rule = f"a mixture with dense_layers below num_hidden_layers={self.num_hidden_layers}"
        yield "experts", are_there, rule, "Layers are counted from 0."
        kinds = self.layer_types
        is_listed = kinds is None or (isinstance(kinds, tuple) and len(kinds) == self.num_hidden_layers)
        rule = f"None or one of {FULL!r} and {SLIDING!r} for each of num_hidden_layers={self.num_hidden_layers}"
        are_known = is_listed and all(kind in (FULL, SLIDING) for kind in kinds or ())
        yield "layer_types", are_known, rule, "Layers of other types are not known here."
        needs = SLIDING in (kinds or ())
        yield "sliding_window", window is not None or not needs, f"given for layers of {SLIDING!r}", "Pass it."
        is_float = self.dtype is None or jnp.issubdtype(self.dtype, jnp.floating)
        yield "dtype", is_float, "a floating-point dtype or None", "Leave it out."


_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
"""By the type of model, how names of classes of `transformers` begin."""

_COMPUTED = {
    "hidden_act": ("silu",),
    **dict.fromkeys(("attention_bias", "mlp_bias", "output_router_logits"), (False,)),
    "router_jitter_noise": (0.0,),
}

_SHARED = (
    *_SIZES,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_dropout"),
    "initializer_range",
)
"""Fields that every family has by their names."""

_KEY_HEADS: Mapping[str, int] = {
    **{"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4}
}
"""What `transformers` takes where the key is left out, if that is not the number of heads of queries."""


def _rotary(keys: ConfigKeys) -> tuple[float, RotaryScaling | None]:
    """Base and scaling, of today's `rope_parameters` or of `rope_theta` and `rope_scaling`."""
    names = ("rope_parameters", "rope_scaling")
    given = {name: values for name in names if (values := keys.mapping(name))}
    found = [_rotary_of(keys, name, values) for name, values in (given or {names[0]: {}}).items()]
    if found[0] != found[-1]:
        raise wrong(names[1], "left out beside rope_parameters that differ", given[names[1]], "Remove one of them")
    return found[0]


def _rotary_of(keys: ConfigKeys, name: str, values: dict[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Base and scaling of one of the two."""
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] or ["default"]
    if kinds[0] is None or kinds[0] != kinds[-1]:
        got = kinds[0] if len(kinds) == 1 else kinds
        raise wrong(f"{name}.rope_type", "the name of one kind", got, "Correct it, or leave it out for no scaling")
    values = {key: value for key, value in values.items() if value is not None}
    theta = keys.get("rope_theta", None)
    if "rope_theta" in values:
        check_value("rope_theta", theta, values["rope_theta"])
        theta = values.pop("rope_theta")
    theta = (1e6 if keys.model_type == "mixtral" else 10000.0) if theta is None else theta
    check_value(f"{name}.partial_rotary_factor", values.pop("partial_rotary_factor", None), 1.0)
    values.pop("finetuned", None)  # says how the weights came to be
    if kinds[0] == "default":
        if values:
            key = next(iter(values))
            rule = "left out, as angles without scaling do not depend on it"
            raise wrong(
                f"{name}.{key}", rule, values[key], "Correct its name, or give the rope_type that it belongs to"
            )
        return theta, None
    own, context = "original_max_position_embeddings", keys.get("max_position_embeddings", 0)
    if kinds[0] in ("llama3", "yarn"):
        outer = keys.get(own, None)
        context = values.pop(own, context if outer is None else outer)
        check_value(own, outer, context)
    else:
        check_value(f"{name}.{own}", values.pop(own, None), *([context] if kinds[0] == "dynamic" else []))
    if kinds[0] != "linear":
        values[own] = context
    return theta, RotaryScaling.from_dict({"rope_type": kinds[0], **values})


def _scaling_of(scaling: RotaryScaling) -> dict[str, Any]:
    """The value of `rope_scaling`."""
    given = {field.name: getattr(scaling, field.name) for field in fields(scaling)}
    told = {field.name for field in fields(scaling) if given[field.name] != field.default}
    told -= {"original_max_position_embeddings"} if scaling.rope_type in ("linear", "dynamic") else set()
    return {name: value for name, value in given.items() if name in told}


def _experts_of(family: str, experts: ExpertsConfig) -> dict[str, Any]:
    """Keys of a mixture of experts."""
    found: dict[str, Any] = {"num_experts_per_tok": experts.num_experts_per_tok}
    if family == "mixtral":
        return found | {"num_local_experts": experts.num_experts, "intermediate_size": experts.intermediate_size}
    found |= {"num_experts": experts.num_experts, "moe_intermediate_size": experts.intermediate_size}
    found |= {"norm_topk_prob": experts.norm_topk_prob, "mlp_only_layers": list(experts.dense_layers)}
    return found | ({"shared_expert_intermediate_size": experts.shared_size} if family == "qwen2_moe" else {})


def _windows(keys: ConfigKeys) -> dict[str, Any]:
    """The window, and which layers have it."""
    family, num_layers = keys.model_type, keys.size("num_hidden_layers")
    if family in ("mistral", "mixtral"):  # null means none
        window = keys.get("sliding_window", None if family == "mixtral" else 4096)
        keys.check("use_sliding_window", window is not None)
        _check_kinds(keys, FULL if window is None else SLIDING, num_layers)
        return {"sliding_window": window}
    if family not in ("qwen2", "qwen3"):
        if family != "llama":
            keys.get("sliding_window", None)  # which `use_sliding_window` alone turns on
        _check_kinds(keys, FULL, num_layers)
        return {}
    is_used, first = keys.flag("use_sliding_window", False), keys.size("max_window_layers", 28, least=0)
    window = keys.get("sliding_window", 4096)
    if not is_used or window is None:
        _check_kinds(keys, FULL, num_layers)
        return {}
    kinds = keys.get("layer_types", None)
    if kinds is None:
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return {"sliding_window": window, "layer_types": kinds}


def _check_kinds(keys: ConfigKeys, kind: str, num_layers: int) -> None:
    """Refuse layers of other kinds than the one that all are of here."""
    kinds = keys.get("layer_types", None)
    are_right = isinstance(kinds, list | tuple) and len(kinds) == num_layers and all(each == kind for each in kinds)
    if kinds is not None and not are_right:
        repair = "The layers here compute nothing else with the other keys: correct these, or use a model of your own"
        raise wrong("layer_types", f"{kind!r} for each of num_hidden_layers={num_layers}", kinds, repair)


def _experts(keys: ConfigKeys) -> ExpertsConfig | None:
    """The mixture of experts, and the layers without."""
    family = keys.model_type
    if family != "mixtral" and not family.endswith("_moe"):
        return None
    local = keys.get("num_local_experts", None)
    number = keys.size("num_experts" if local is None else "num_local_experts")
    keys.check("num_experts", number)
    per_token = keys.size("num_experts_per_tok", {"mixtral": 2, "qwen2_moe": 4, "qwen3_moe": 8}[family])
    if family == "mixtral":
        return ExpertsConfig(number, per_token, keys.size("intermediate_size"))
    step, num_layers = keys.size("decoder_sparse_step", 1), keys.size("num_hidden_layers")
    dense = keys.get("mlp_only_layers", None)
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or not all(is_size(layer, 0) and layer < num_layers for layer in dense):
        raise wrong("mlp_only_layers", f"numbers of layers below num_hidden_layers={num_layers}", dense, "Correct it")
    return ExpertsConfig(
        number,
        per_token,
        keys.size("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        shared_size=keys.size("shared_expert_intermediate_size", least=0) if family == "qwen2_moe" else 0,
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step),
    )
