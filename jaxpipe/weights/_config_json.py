"""A model's `config.json`."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.files import parse_json
from jaxpipe._util.paths import any_path, read_any
from jaxpipe._util.stores import StorePath
from jaxpipe.errors import ConfigError, shown

from ._rename import Match, Rename

CONFIG = "config.json"

_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")
_WEIGHT_FORMATS = ("quantization_config", "compression_config", "quantization")
_BIASES = {
    "attention_bias": frozenset({"attention", "attn", "self_attn", "self_attention"}),
    "mlp_bias": frozenset({"feed_forward", "mlp"}),
}
"""Modules whose products have biases where the key is true."""
_WORDS = {
    "audio_config": ("audio",),
    "text_config": ("language", "text"),
    "vision_config": ("vision", "visual"),
}
"""Words that begin steps in the names of tensors of usual parts of a model."""

Source = str | PathLike[str] | StorePath | Mapping[str, Any]
"""A folder with a `config.json`, the file itself, or its contents."""


def read_config_json(source: Source) -> Mapping[str, Any]:
    """Read a model's `config.json`.

    Args:
        source: The folder with the file, the file itself, or its contents.

    Returns:
        The contents.

    Raises:
        ConfigError: There is no such file, or it does not hold a dictionary.
    """
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, PathLike, StorePath)):
        raise ConfigError(
            "a model's config.json must be a folder, a file or a dictionary, but got "
            f"{shown(source)}. Name the folder that it is in."
        )
    path = any_path(source, "a model's config.json", ConfigError)
    try:
        path = path / CONFIG if path.is_dir() else path
        values = parse_json(read_any(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"a model's config.json must be readable, but got {path}: {error}. Name the folder "
            "that it is in."
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a dictionary, but got {shown(values)}. Name a model's config.json."
        )
    return values


def dump_config(
    config: Mapping[str, Any],
    tensors: Mapping[str, jax.ShapeDtypeStruct],
    renames: Sequence[Rename],
    matches: Iterable[Match],
) -> bytes:
    """Write `config.json` for the tensors that a folder holds, from the contents `config`.

    Raises ConfigError if these describe weights that the tensors do not have: `transformers` would
    refuse the folder or draw them at random.
    """
    # The dtype, and whether the head is tied, are those of the tensors, also in the configurations
    # of parts: `config` may be that of the base.
    true: dict[str, Any] = {}
    dtypes = [x.dtype for x in tensors.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    if dtypes:
        # Before version 5 of `transformers` the key had the second name. Version 5 reads both.
        true |= dict.fromkeys(("dtype", "torch_dtype"), jnp.result_type(*dtypes).name)
    heads = {name for rename in renames for name in rename.their_names if _HEAD.search(name)}
    if heads:
        if not any(heads.intersection(names) for match in matches for names in match.theirs):
            raise ConfigError(
                "a table of names that has a head must be that of a model with one, but got a "
                f"model without {min(heads, key=len)!r}. Make the table from the configuration "
                "with tie_word_embeddings=True, if the head is tied."
            )
        true["tie_word_embeddings"] = heads.isdisjoint(tensors)
    # One of the two names of the dtype suffices: the one that the contents have.
    least = true.keys() - {"dtype" if "torch_dtype" in config else "torch_dtype"}
    written = _described({**dict.fromkeys(least), **config}, tensors, true)
    try:
        return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a model's config.json must hold what JSON can, but got {error}. Convert it, for "
            "instance an integer of NumPy to int."
        ) from error


def _described(
    config: Mapping[str, Any],
    tensors: Mapping[str, jax.ShapeDtypeStruct],
    true: Mapping[str, Any],
) -> dict[str, Any]:
    """Check a configuration, or that of a part, and set the keys of `true` that it has."""
    # Tensors are written as plain numbers, whatever format the weights of the base have.
    written = {key: value for key, value in config.items() if key not in _WEIGHT_FORMATS}
    written |= {key: value for key, value in true.items() if key in config}
    for key, value in written.items():
        if isinstance(value, Mapping) and (key in _WORDS or "model_type" in value):
            written[key] = _described(value, _part_of(key, tensors), true)
    for key in ("num_hidden_layers", "n_layer"):
        _check_blocks(key, config, tensors)
    _check_table(config, tensors)
    for key, modules in _BIASES.items():
        _check_biases(key, modules, config, tensors)
    return written


def _part_of(
    key: str, tensors: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the tensors of a part of a model; refuses a part that has none."""
    words = "|".join(_WORDS.get(key, (re.escape(key.removesuffix("_config")),)))
    step = re.compile(rf"(^|[._])({words})")
    found = {name: tensor for name, tensor in tensors.items() if step.search(name)}
    if not found:
        raise ConfigError(
            f"config.json must describe the tensors that are written, but got {key} without any "
            "tensors of this part. Pass the configuration of the part that you trained, for "
            "instance LlamaConfig.from_huggingface(config).to_huggingface(max_position_embeddings)."
        )
    return found


def _wrong(told: str, held: str, key: str) -> ConfigError:
    return ConfigError(
        f"config.json must describe the tensors that are written, but got {told} and {held}. Pass "
        "the configuration of the model that you trained.",
        paths=[key],
    )


def _check_blocks(key: str, config: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse a number of blocks that no list of modules has."""
    lists: dict[str, set[int]] = {}
    for found in filter(None, map(_BLOCK.match, names)):
        lists.setdefault(found[1], set()).add(int(found[2]))
    count = config.get(key)
    counts = [len(each) for each in lists.values()]
    # Extra layers that predict several tokens are in the same list.
    extra = config.get("num_nextn_predict_layers") or 0
    if lists and isinstance(count, int) and not {count, count + extra}.intersection(counts):
        raise _wrong(f"{key}={count}", f"tensors of {max(counts)} blocks", key)


def _check_table(config: Mapping[str, Any], tensors: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Refuse sizes of the vocabulary and of an embedding that no table outside the blocks has."""
    shapes = [
        tensor.shape
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2 and not _BLOCK.match(name)
    ]
    if not (shapes and isinstance(config.get("vocab_size"), int)):
        return
    width = "embedding_size" if "embedding_size" in config else "hidden_size"
    for dim, key in (0, "vocab_size"), (1, width), (1, "n_embd"):
        size = config.get(key)
        sizes = [shape[dim] for shape in shapes]
        if isinstance(size, int) and size not in sizes:
            raise _wrong(f"{key}={size}", f"an embedding of shape {shapes[0]}", key)


def _check_biases(
    key: str, modules: frozenset[str], config: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Refuse a flag for biases that the tensors do not have, or the other way round."""
    has_biases = any(
        name.endswith(".bias") and "norm" not in name and not modules.isdisjoint(name.split("."))
        for name in names
    )
    is_told = config.get(key)
    if isinstance(is_told, bool) and is_told != has_biases:
        raise _wrong(f"{key}={is_told}", f"tensors {'with' if has_biases else 'without'} them", key)
