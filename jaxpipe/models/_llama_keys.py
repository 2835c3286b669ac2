"""The keys of a `config.json` for the Llama decoder, read and written by family."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from jaxpipe.config import Section, wrong_value
from jaxpipe.distributed import log
from jaxpipe.weights import Source, read_config_json

from ._families import FAMILIES, Family
from ._huggingface import ConfigKeys, check_value
from ._latent_config import LatentConfig, read_latent
from ._parts import FULL, PARTS, SLIDING, Heads
from ._rotary import RotaryScaling
from ._windows import read_unrotated, write_unrotated

T = TypeVar("T", bound=Section)

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

_SHARED = (
    *SIZES,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_dropout",
    "initializer_range",
)
"""Fields that each family has, with their own names as keys unless the family has another key."""

_OF_THE_WHOLE = ("tie_word_embeddings", "quantization_config")
"""Keys of a model with images that concern its text part."""

_SEPARATE = ("partial_rotary_factor", "rope_local_base_freq")
"""Fields of only some families that are read together with the rotary embedding."""


_TEXTS = {family.text_of: name for name, family in FAMILIES.items() if family.text_of}
"""Families of text parts, by the `model_type` of the whole model."""


def read_text(source: Source) -> Mapping[str, Any]:
    """Read a `config.json`. Of a model with images, return the keys of the text part."""
    values = read_config_json(source)
    whole = values.get("model_type")
    if not isinstance(whole, str) or whole not in _TEXTS:
        return values
    text = values.get("text_config")
    text = values if text is None else text
    if not isinstance(text, Mapping):
        raise wrong_value(
            "text_config", "an object or null", text, "Copy it from the model's files"
        )
    check_value("text_config.model_type", text.get("model_type"), whole, _TEXTS[whole])
    log(logging.INFO, "only the text part of the %s model is read", whole)
    # The text part wins where both have a key.
    outer = {key: values[key] for key in _OF_THE_WHOLE if key in values}
    return {**outer, **text, "model_type": _TEXTS[whole]}


def read_llama(keys: ConfigKeys, family: Family, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a `LlamaConfig` and its parts, or refuse what it cannot be."""
    # A key that was asked for is not named in the warning of unknown ones.
    for key in family.ignored:
        keys.get(key, None)
    defaults = {**defaults, **family.defaults}
    keys.size("max_position_embeddings", 1)  # read with a scaling
    found = {**_rotary(keys, family, defaults), **family.fixed}
    for name, key in {**dict.fromkeys(_SHARED), **family.keys}.items():
        default = defaults.get(name)
        if name in _SEPARATE or name in family.fixed:
            continue
        if name in SIZES:
            found[name] = keys.size(key or name)
        elif isinstance(default, bool):
            found[name] = keys.flag(key or name, default)
        else:
            found[name] = keys.get(key or name, default)
    # Keys of other families must not contradict what this family computes.
    keys.check("qkv_bias", found.get("qkv_bias", False))
    for key in {"qk_norm", "use_qk_norm"} - set(family.keys.values()):
        keys.check(key, found.get("qk_norm", False))
    return found | _parts(keys, family)


def _parts(keys: ConfigKeys, family: Family) -> dict[str, Any]:
    """Read the fields of the parts that only some families have."""
    found = family.windows.read(keys)
    if family.has_unrotated:
        found["nope_layers"] = read_unrotated(keys)
    if family.has_latent:
        found["attention"] = read_latent(keys)
    if family.has_eight_bits:
        _check_eight_bits(keys)
    if family.mixture is not None:
        found["experts"] = family.mixture.read(keys)
    return found


def made_of(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make a section from those of the values that are its fields."""
    return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


def values_of(config: Any) -> dict[str, Any]:
    """Return the values of a `LlamaConfig` and its parts, by field, with or without heads."""
    found = vars(Heads()) | vars(config)
    for name in PARTS:
        found |= vars(found.pop(name))
    return found


def write_llama(
    config: Any, name: str, family: Family, max_position_embeddings: int
) -> dict[str, Any]:
    """Make a family's `config.json` for a `LlamaConfig`; fields without a key are left out."""
    rotary = config.rotary
    scaling = rotary.rope_scaling
    values = values_of(config)
    found: dict[str, Any] = {
        "model_type": family.written_as or name,
        "architectures": [f"{family.classes}ForCausalLM"],
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": rotary.rope_theta,
    }
    for field, key in {**dict.fromkeys(_SHARED), **family.keys}.items():
        found[key or field] = values[field]
    if scaling is None and "rope_scaling" in family.defaults:
        found["rope_parameters"] = {"rope_type": "default"}  # without it, the family's scaling
    if scaling is not None:
        found["rope_scaling"] = scaling.to_dict()
        context = scaling.original_max_position_embeddings
        if scaling.rope_type == "dynamic":  # this key gives its context
            found["max_position_embeddings"] = context
        elif context:
            # Where it is given twice, `transformers` prefers this one.
            found[_CONTEXT] = context
    if found.get("rope_local_base_freq", 0) is None and scaling is None:
        found["rope_local_base_freq"] = rotary.rope_theta
    found |= family.windows.write(config)
    if family.has_unrotated:
        found |= write_unrotated(config)
    if family.has_latent and isinstance(config.attention, LatentConfig):
        found |= config.attention.to_dict()
    if family.mixture is not None and config.experts is not None:
        found |= family.mixture.write(config, config.experts)
    return found


def _check_eight_bits(keys: ConfigKeys) -> None:
    """Refuse weights in other formats than those that are read as products."""
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    found = keys.mapping("quantization_config")
    for key, value in wanted.items():
        if found and found.get(key, value) != value:
            rule = f"{value!r}, as matrices in this format are read as numbers"
            repair = "Write the weights in BF16, dequantised, and remove quantization_config"
            raise wrong_value(f"quantization_config.{key}", rule, found[key], repair)


_CONTEXT = "original_max_position_embeddings"


def _rotary(keys: ConfigKeys, family: Family, defaults: dict[str, Any]) -> dict[str, Any]:
    """Read the rotary embedding from `rope_parameters`, or from several keys."""
    names = ("rope_parameters", "rope_scaling")
    given = {name: values for name in names if (values := keys.mapping(name))}
    found = [
        _rotary_of(keys, family, defaults, name, values)
        for name, values in (given or {names[0]: dict(defaults["rope_scaling"] or {})}).items()
    ]
    if found[0] != found[-1]:
        repair = "Remove one of them"
        raise wrong_value(names[1], "left out if rope_parameters differ", given[names[1]], repair)
    return found[0]


def _rotary_of(
    keys: ConfigKeys, family: Family, defaults: dict[str, Any], name: str, values: dict[str, Any]
) -> dict[str, Any]:
    """Read the rotary embedding from one of the two keys."""
    theta = keys.get("rope_theta", None)
    if "rope_local_base_freq" not in family.keys:
        return _angles(keys, family, name, values, theta, defaults["rope_theta"])
    # Layers with a window have angles of their own.
    local = keys.get("rope_local_base_freq", defaults["rope_local_base_freq"])
    if values.keys() & {FULL, SLIDING}:
        own = _of_kind(name, values, SLIDING)
        found = _angles(keys, family, f"{name}.{SLIDING}", own, None, local)
        if found["rope_scaling"] is not None:
            rule = "that of angles without scaling"
            raise wrong_value(f"{name}.{SLIDING}", rule, own, "Use a model of your own")
        local = found["rope_theta"]
        values = _of_kind(name, values, FULL)
        name = f"{name}.{FULL}"
    found = _angles(keys, family, name, values, theta, defaults["rope_theta"])
    return {**found, "rope_local_base_freq": local}


def _of_kind(name: str, values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the values of one kind of layers."""
    other = next((key for key in values if key not in (FULL, SLIDING)), None)
    own = values.get(kind)
    if other is not None or not isinstance(own, dict | None):
        rule = f"one object for {FULL} and one for {SLIDING}"
        raise wrong_value(name, rule, values, "Copy it from the model's config.json")
    return dict(own or {})


def _kind(name: str, values: dict[str, Any]) -> str:
    """Take the kind of scaling out of `values`; it may have an older name."""
    kinds = [values.pop(key) for key in ("rope_type", "type") if key in values] or ["default"]
    if kinds[0] is None or kinds[0] != kinds[-1]:
        got = kinds[0] if len(kinds) == 1 else kinds
        repair = "Correct it, or leave it out for no scaling"
        raise wrong_value(f"{name}.rope_type", "the name of one kind", got, repair)
    # The first name of longrope, in Phi's files.
    kind = "longrope" if kinds[0] == "su" else kinds[0]
    if values.pop("mrope_section", None) is None:
        return kind
    # An image has positions in three dims, which are equal for text.
    check_value(f"{name}.rope_type", kind, "default", "mrope")
    return "default"


def _angles(
    keys: ConfigKeys,
    family: Family,
    name: str,
    values: dict[str, Any],
    theta: Any,
    default_theta: float,
) -> dict[str, Any]:
    """Read base and scaling, and the share of rotated dims if the family has one."""
    kind = _kind(name, values)
    values = {key: value for key, value in values.items() if value is not None}
    if "rope_theta" in values:
        check_value("rope_theta", theta, values["rope_theta"])
        theta = values.pop("rope_theta")
    found: dict[str, Any] = {"rope_theta": default_theta if theta is None else theta}
    # Either place may have it.
    share = values.pop("partial_rotary_factor", None)
    if "partial_rotary_factor" in family.keys:
        outer = keys.get("partial_rotary_factor", None)
        share = outer if share is None else share
        check_value("partial_rotary_factor", outer, share)
        found["partial_rotary_factor"] = 1.0 if share is None else share
    else:
        check_value(f"{name}.partial_rotary_factor", share, 1.0)
    values.pop("finetuned", None)  # only describes how the weights were made
    if kind == "default":
        if values:
            key = next(iter(values))
            rule = "left out, as angles without scaling do not depend on it"
            repair = "Correct its name, or give the rope_type that it belongs to"
            raise wrong_value(f"{name}.{key}", rule, values[key], repair)
        return {**found, "rope_scaling": None}
    longest = keys.get("max_position_embeddings", 0)
    context = longest
    if kind in ("llama3", "yarn", "longrope"):
        outer = keys.get(_CONTEXT, family.defaults.get(_CONTEXT))
        context = values.pop(_CONTEXT, longest if outer is None else outer)
        check_value(_CONTEXT, outer, context)
    else:
        check_value(
            f"{name}.{_CONTEXT}",
            values.pop(_CONTEXT, None),
            *([longest] if kind == "dynamic" else []),
        )
    if kind == "longrope" and "factor" not in values and context:
        values["factor"] = longest / context
    if kind != "linear":
        values[_CONTEXT] = context
    return {**found, "rope_scaling": RotaryScaling.from_dict({"rope_type": kind, **values})}
