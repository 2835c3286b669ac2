"""From a file or a dictionary to the configuration."""

import json
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from jaxpipe.errors import ConfigError

from ._classes import TrainingConfig
from ._section import read_section, unused_keys
from ._train import TrainConfig
from ._values import shown


class ConfigWarning(UserWarning):
    """Keys of the configuration are accepted and have no effect."""


def load_config(config: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None) -> TrainConfig:
    """Read the configuration.

    Every key is checked: one that is misspelt or that DeepSpeed knows and this library does not is an error, never
    ignored, unless its value asks for nothing, as in `"flops_profiler": {"enabled": false}`. Keys that only tune
    PyTorch are accepted, with one `ConfigWarning` for all of them.

    Args:
        config: A dictionary, the path of a JSON file, a `TrainConfig` (returned as it is), a
            `TrainingConfig`, or None for all defaults.

    Returns:
        The configuration.

    Raises:
        ConfigError: The file cannot be read or is not JSON, a key is given twice, is unknown or is refused, or a value
            is of the wrong type or out of range.
    """
    if config is None:
        return TrainConfig()
    if isinstance(config, TrainConfig):
        return config
    if isinstance(config, TrainingConfig):
        return config.to_train_config()
    if isinstance(config, Mapping):
        return _read(cast("Mapping[object, object]", config))
    if not isinstance(cast("object", config), str | PathLike):
        raise ConfigError(
            f"config must be a dictionary or the path of a JSON file, but got config={shown(config)}. "
            "Pass a dict, a str or a pathlib.Path."
        )
    file = Path(config)
    mapping = _parse(file)
    try:
        return _read(mapping)
    except ConfigError as error:
        raise ConfigError(f"{error} (Read from {file}.)") from error


def _read(mapping: Mapping[object, object]) -> TrainConfig:
    config = read_section(TrainConfig, mapping)
    unused = unused_keys(TrainConfig, mapping)
    if unused:
        warnings.warn(
            f"The configuration sets keys that have no effect: {', '.join(unused)}. They tune PyTorch, and XLA has no "
            "counterpart; remove them to silence this warning.",
            ConfigWarning,
            stacklevel=3,
        )
    return config


class _Object(dict[object, object]):
    """A JSON object that remembers which of its keys came more than once."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        self.repeated = None if repeated is None else (repeated, [value for key, value in pairs if key == repeated])


def _parse(file: Path) -> _Object:
    """The JSON object that a file holds."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"config must be the path of a JSON file, but got config={str(file)!r}, which does not exist. "
            f"Correct the path; it is relative to {Path.cwd()}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config must be a readable JSON file in UTF-8, but got config={str(file)!r}: {error}. "
            "Name a file that can be read."
        ) from error
    try:
        value: object = json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"config must be valid JSON, but got {error.msg} in {file} at line {error.lineno}, column {error.colno}. "
            "Correct the file there."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config must be valid JSON, but got {error} in {file}. Correct the file.") from error
    if not isinstance(value, _Object):
        raise ConfigError(f"config must be a JSON object, but got {shown(value)} in {file}. Write {{...}} there.")
    _check_repeated(value, file)
    return value


def _check_repeated(root: _Object, file: Path) -> None:
    pending: list[tuple[object, str]] = [(root, "")]
    while pending:
        value, path = pending.pop()
        if isinstance(value, _Object):
            prefix = f"{path}." if path else ""
            if value.repeated is not None:
                key, values = value.repeated
                raise ConfigError(
                    f"{prefix}{key} must be given once, but got {prefix}{key}={' and '.join(map(shown, values))} "
                    f"in {file}. Remove all but one."
                )
            pending += [(inner, f"{prefix}{key}") for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [(inner, f"{path}[{index}]") for index, inner in enumerate(cast("list[object]", value))]
