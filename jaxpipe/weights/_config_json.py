"""A model's `config.json`."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._files import parse_json
from jaxpipe._paths import any_path, read_any
from jaxpipe._stores import StorePath
from jaxpipe.errors import ConfigError, shown

from ._rename import Match, Rename

CONFIG = "config.json"

_HEAD = re.compile(r"(^|\.)lm_head\.weight$")
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")
_WEIGHT_FORMATS = ("quantization_config", "compression_config")
_WORDS = {
    "audio_config": ("audio",),
    "text_config": ("language", "text"),
    "vision_config": ("vision", "visual"),
}
"""Words in the names of tensors of usual parts of a model."""

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
    """Write `config.json` for the tensors that a folder holds, with their dtype and tied head.

    `config` may be that of the base. `matches` are the entries of `renames` for the model's leaves.
    """
    written = {key: value for key, value in config.items() if key not in _WEIGHT_FORMATS}
    # `transformers` would draw the weights of parts, blocks or a head without tensors at random.
    for key in written:
        _check_part(key, written[key], tensors)
    for key in ("num_hidden_layers", "n_layer"):
        _check_blocks(key, written, tensors)
    dtypes = [x.dtype for x in tensors.values() if jnp.issubdtype(x.dtype, jnp.floating)]
    if dtypes:
        # Before version 5 of `transformers` the key had another name. Version 5 reads both.
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        written[key] = jnp.result_type(*dtypes).name
    heads = {name for rename in renames for name in rename.their_names if _HEAD.search(name)}
    if heads:
        if not any(heads.intersection(names) for match in matches for names in match.theirs):
            raise ConfigError(
                "a table of names that has a head must be that of a model with one, but got a "
                f"model without {min(heads, key=len)!r}. Make the table from the configuration "
                "with tie_word_embeddings=True, if the head is tied."
            )
        written["tie_word_embeddings"] = heads.isdisjoint(tensors)
    return (json.dumps(written, indent=2, sort_keys=True) + "\n").encode()


def _check_part(key: str, value: Any, names: Iterable[str]) -> None:
    """Refuse the configuration of a part of a model that has no tensors."""
    is_part = isinstance(value, Mapping) and (key in _WORDS or "model_type" in value)
    words = _WORDS.get(key, (key.removesuffix("_config"),))
    if is_part and not any(word in name for name in names for word in words):
        raise ConfigError(
            f"config.json must describe the tensors that are written, but got {key} without any "
            "tensors of this part. Pass the configuration of the part that you trained, for "
            "instance LlamaConfig.from_huggingface(config).to_huggingface(max_position_embeddings)."
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
        raise ConfigError(
            f"config.json must describe the tensors that are written, but got {key}={count} and "
            f"tensors of {max(counts)} blocks. Pass the configuration of the model that you "
            "trained.",
            paths=[key],
        )
