"""A model's `config.json`."""

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._files import parse_json
from jaxpipe._paths import any_path, read_any
from jaxpipe._stores import StorePath
from jaxpipe.errors import ConfigError, shown

CONFIG = "config.json"

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


def dump_config(config: Mapping[str, Any], tensors: Iterable[jax.ShapeDtypeStruct]) -> bytes:
    """Write the contents of `config.json`, with the dtype in which the model is opened."""
    dtypes = {tensor.dtype.name for tensor in tensors if jnp.issubdtype(tensor.dtype, jnp.floating)}
    # Before version 5 of `transformers` the key had another name. Version 5 reads both.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    named = {key: dtypes.pop()} if len(dtypes) == 1 else {}
    return (json.dumps({**config, **named}, indent=2, sort_keys=True) + "\n").encode()
