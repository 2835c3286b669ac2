"""Reading of the keys of a `config.json` for the Llama decoder, by family."""

from typing import Any

from ._experts_config import ExpertsConfig
from ._families import FULL, SLIDING, Family, Flag, Mixture
from ._huggingface import ConfigKeys, check_value, wrong
from ._rotary import RotaryScaling
from ._rules import is_size

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def read_llama(keys: ConfigKeys, family: Family) -> dict[str, Any]:
    """Read the fields of a `LlamaConfig`; refuses values that the decoder does not support."""
    for key in family.ignored:
        keys.get(key, None)
    keys.size("max_position_embeddings", 1)  # read with a scaling
    theta, scaling = _rotary(keys, family.rope_theta)
    qkv_bias = _flag(keys, family.qkv_bias)
    keys.check("qkv_bias", qkv_bias)
    for key in ("qk_norm", "use_qk_norm"):
        keys.check(key, family.qk_norm)
    return {
        **{name: keys.size(name) for name in SIZES},
        "num_key_value_heads": keys.get("num_key_value_heads", family.num_key_value_heads),
        "head_dim": keys.get("head_dim", family.head_dim),
        "rms_norm_eps": keys.get("rms_norm_eps", family.rms_norm_eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qkv_bias": qkv_bias,
        "out_bias": _flag(keys, family.out_bias),
        "mlp_bias": _flag(keys, family.mlp_bias),
        "qk_norm": family.qk_norm,
        **_windows(keys, family),
        "tie_word_embeddings": keys.get("tie_word_embeddings", False),
        "attention_dropout": keys.get("attention_dropout", 0.0),
        "initializer_range": keys.get("initializer_range", 0.02),
        "experts": None if family.mixture is None else _experts(keys, family.mixture),
    }


def _flag(keys: ConfigKeys, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else keys.flag(*flag)


def _rotary(keys: ConfigKeys, default: float) -> tuple[float, RotaryScaling | None]:
    """Read base and scaling from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    names = ("rope_parameters", "rope_scaling")
    given = {name: values for name in names if (values := keys.mapping(name))}
    found = [
        _rotary_of(keys, default, name, values)
        for name, values in (given or {names[0]: {}}).items()
    ]
    if found[0] != found[-1]:
        raise wrong(
            names[1],
            "left out if rope_parameters differ",
            given[names[1]],
            "Remove one of them",
        )
    return found[0]


def _rotary_of(
    keys: ConfigKeys, default: float, name: str, values: dict[str, Any]
) -> tuple[float, RotaryScaling | None]:
    """Read base and scaling from one of the two forms."""
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] or ["default"]
    if kinds[0] is None or kinds[0] != kinds[-1]:
        got = kinds[0] if len(kinds) == 1 else kinds
        raise wrong(
            f"{name}.rope_type",
            "the name of one kind",
            got,
            "Correct it, or leave it out for no scaling",
        )
    values = {key: value for key, value in values.items() if value is not None}
    theta = keys.get("rope_theta", None)
    if "rope_theta" in values:
        check_value("rope_theta", theta, values["rope_theta"])
        theta = values.pop("rope_theta")
    theta = default if theta is None else theta
    check_value(f"{name}.partial_rotary_factor", values.pop("partial_rotary_factor", None), 1.0)
    values.pop("finetuned", None)  # only describes how the weights were made
    if kinds[0] == "default":
        if values:
            key = next(iter(values))
            rule = "left out, as angles without scaling do not depend on it"
            raise wrong(
                f"{name}.{key}",
                rule,
                values[key],
                "Correct its name, or give the rope_type that it belongs to",
            )
        return theta, None
    own, context = "original_max_position_embeddings", keys.get("max_position_embeddings", 0)
    if kinds[0] in ("llama3", "yarn"):
        outer = keys.get(own, None)
        context = values.pop(own, context if outer is None else outer)
        check_value(own, outer, context)
    else:
        check_value(
            f"{name}.{own}", values.pop(own, None), *([context] if kinds[0] == "dynamic" else [])
        )
    if kinds[0] != "linear":
        values[own] = context
    return theta, RotaryScaling.from_dict({"rope_type": kinds[0], **values})


def _windows(keys: ConfigKeys, family: Family) -> dict[str, Any]:
    """Read the window, and which layers have it."""
    num_layers = keys.size("num_hidden_layers")
    if family.windows == "none":
        _check_kinds(keys, FULL, num_layers)
        return {}
    window = keys.get("sliding_window", family.sliding_window)  # null means none
    if family.windows == "all":
        keys.check("use_sliding_window", window is not None)
        _check_kinds(keys, FULL if window is None else SLIDING, num_layers)
        return {"sliding_window": window}
    is_used, first = (
        keys.flag("use_sliding_window", False),
        keys.size("max_window_layers", 28, least=0),
    )
    if not is_used or window is None:
        _check_kinds(keys, FULL, num_layers)
        return {}
    kinds = keys.get("layer_types", None)
    if kinds is None:
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return {"sliding_window": window, "layer_types": kinds}


def _check_kinds(keys: ConfigKeys, kind: str, num_layers: int) -> None:
    """Refuse layers of other kinds than `kind`."""
    kinds = keys.get("layer_types", None)
    are_right = (
        isinstance(kinds, list | tuple)
        and len(kinds) == num_layers
        and all(each == kind for each in kinds)
    )
    if kinds is not None and not are_right:
        repair = (
            "The layers here compute nothing else with the other keys: correct these, or use a "
            "model of your own"
        )
        raise wrong(
            "layer_types", f"{kind!r} for each of num_hidden_layers={num_layers}", kinds, repair
        )


def _experts(keys: ConfigKeys, mixture: Mixture) -> ExpertsConfig:
    """Read the mixture of experts, and the layers without it."""
    local = keys.get("num_local_experts", None)
    number = keys.size("num_experts" if local is None else "num_local_experts")
    keys.check("num_experts", number)
    per_token, size = (
        keys.size("num_experts_per_tok", mixture.num_experts_per_tok),
        keys.size(mixture.size),
    )
    if not mixture.has_dense_layers:
        return ExpertsConfig(number, per_token, size)
    step, num_layers = keys.size("decoder_sparse_step", 1), keys.size("num_hidden_layers")
    dense = keys.get("mlp_only_layers", None)
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or not all(
        is_size(layer, 0) and layer < num_layers for layer in dense
    ):
        raise wrong(
            "mlp_only_layers",
            f"numbers of layers below num_hidden_layers={num_layers}",
            dense,
            "Correct it",
        )
    return ExpertsConfig(
        number,
        per_token,
        size,
        norm_topk_prob=keys.flag("norm_topk_prob", False),
        shared_size=0 if mixture.shared_size is None else keys.size(mixture.shared_size, least=0),
        dense_layers=tuple(
            layer for layer in range(num_layers) if layer in dense or (layer + 1) % step
        ),
    )
