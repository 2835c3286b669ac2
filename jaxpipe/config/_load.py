"""Load the configuration from a file or a dictionary."""

import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

from jaxpipe._util.files import read_file
from jaxpipe._util.paths import local_path
from jaxpipe._util.warn import warn
from jaxpipe.errors import ConfigError, shown

from ._collect import Collector
from ._section import idle_keys, join, read_section
from ._train import TrainConfig

# Both patterns match strings first, so that they skip comments and commas inside them. A string
# that is not closed extends to the end, so that nothing is read twice. JSON refuses it there.
_TEXT = r'"(?:[^"\\]|\\.)*+"?'
_COMMENT = re.compile(rf"({_TEXT})|#[^\n]*|//[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_TEXT}|[\[{{,:]\s*,)|,(?=\s*[}}\]])", re.DOTALL)
_MOST_BYTES = 1 << 26


class ConfigWarning(UserWarning):
    """Warning about settings that are accepted but have no effect."""


def load_config(
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None,
    errors: Collector | None = None,
) -> TrainConfig:
    """Read the configuration.

    Every key is checked. A misspelt key, or a DeepSpeed key that this library does not support, is
    an error unless its value asks for nothing, as in `"elasticity": {"enabled": false}`. One error
    lists everything that is wrong. Keys that change no number, because they tune PyTorch, measure
    or report, are accepted with a single `ConfigWarning`.

    A file contains JSON. As in HJSON, it may have comments (`#`, `//`, `/* */`) and commas before a
    closing bracket.

    Args:
        config: A dictionary, the path of a JSON file, a `TrainConfig` (returned unchanged), an
            object with `to_train_config()`, or None for all defaults. Any object with `keys` and
            `[key]` counts as a dictionary, also inside another, such as the containers of OmegaConf
            and ml_collections.
        errors: Collects the errors of single keys, to be raised later with others. By default they
            are raised here.

    Returns:
        The configuration. With `errors`, wrong values are replaced by their defaults.

    Raises:
        ConfigError: The file cannot be read or is not JSON. Or a key is given twice, unknown or
            refused, or a value is of the wrong type or out of range.
    """
    found = Collector() if errors is None else errors
    result = _load(config, found)
    if errors is None:
        found.raise_all()
    return result


def _load(config: object, errors: Collector) -> TrainConfig:
    if config is None:
        return TrainConfig()
    if isinstance(config, TrainConfig):
        return config
    if hasattr(type(config), "to_train_config"):
        with errors.catch():
            return cast("Any", config).to_train_config()
        return TrainConfig()
    if _is_mapping(config):
        return _read(cast("Mapping[object, object]", config), errors)
    if not isinstance(config, str | PathLike):
        raise ConfigError(
            "config must be a dictionary or the path of a JSON file, but got "
            f"config={shown(config)}. Pass a dict, such as vars(config) or "
            "dataclasses.asdict(config), a str or a pathlib.Path."
        )
    file = local_path(cast("str | PathLike[str]", config), "config")
    mapping = _parse(file)
    errors.source = str(file)
    return _read(mapping, errors)


def _read(mapping: Mapping[object, object], errors: Collector) -> TrainConfig:
    try:
        _check_repeated(mapping, errors)
        mapping = _plain(mapping)
        config = read_section(TrainConfig, mapping, "", errors)
    except RecursionError as error:
        raise ConfigError(
            "config must be nested no deeper than JSON can be, but got an object inside itself, or "
            "hundreds of levels. Give a dictionary of plain values."
        ) from error
    _warn_of_idle_keys(mapping, errors)
    return TrainConfig() if config is None else config


def _is_mapping(value: object) -> bool:
    # As `dict(value)` decides it, because not every container registers itself as a `Mapping`.
    return hasattr(type(value), "keys") and hasattr(type(value), "__getitem__")


def _plain(value: object) -> Any:
    """Convert containers, at any depth, to dictionaries and lists."""
    container: Any = value
    try:
        if _is_mapping(value):
            return {key: _plain(container[key]) for key in container.keys()}  # noqa: SIM118
        if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
            return [_plain(item) for item in container]
    except (ConfigError, RecursionError):
        raise
    except Exception as error:  # a container may raise anything for a value that it cannot give
        raise ConfigError(
            "config must give all its values, but got a "
            f"{type(container).__name__} that raises {type(error).__name__}: {error}. Set the "
            "value, or pass a plain dict, as OmegaConf.to_container(cfg, resolve=True) or "
            "cfg.to_dict() makes it."
        ) from error
    return container


def _warn_of_idle_keys(mapping: Mapping[object, object], errors: Collector) -> None:
    # Errors come first. The warning is shown once they are fixed.
    if not errors.is_clear:
        return
    paths_of: dict[str, list[str]] = {}
    for path, reason in idle_keys(TrainConfig, mapping):
        paths_of.setdefault(reason, []).append(path)
    if paths_of:
        lines = "".join(
            f"\n  - {', '.join(paths)}: {reason}." for reason, paths in paths_of.items()
        )
        warn(
            "The configuration sets keys that have no effect and change no number; remove them to "
            f"silence this warning:{lines}",
            ConfigWarning,
        )


class _Object(dict[object, object]):
    """A JSON object that remembers its repeated keys, with all their values."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        # Reported later, together with the path, which the parser does not know here.
        self.repeated: dict[str, list[object]] = {}
        if len(self) < len(pairs):
            for key, value in pairs:
                self.repeated.setdefault(key, []).append(value)
            self.repeated = {
                key: values for key, values in self.repeated.items() if len(values) > 1
            }


class _LongNumber:
    """An integer with more digits than Python can read; each reader refuses it at its path."""

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __repr__(self) -> str:
        return f"{self._digits[:10]}... ({len(self._digits.lstrip('-'))} digits)"


def _integer(digits: str) -> object:
    try:
        # Python refuses more than 4300 digits, with an error that names neither key nor line.
        return int(digits)
    except ValueError:
        return _LongNumber(digits)


def _parse(file: Path) -> _Object:
    """Read the JSON object in a file."""
    try:
        text = re.sub("\r\n?", "\n", read_file(file, _MOST_BYTES).decode())
    except FileNotFoundError as error:
        raise ConfigError(
            f"config must be the path of a JSON file, but got config={str(file)!r}, which does not "
            f"exist. Correct the path; it is relative to {Path.cwd()}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config must be a readable JSON file in UTF-8, but got config={str(file)!r}: {error}. "
            "Name a file that can be read."
        ) from error
    try:
        value: object = json.loads(
            _as_strict_json(text), object_pairs_hook=_Object, parse_int=_integer
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"config must be valid JSON, but got {error.msg} in {file} at line {error.lineno}, "
            f"column {error.colno}. Correct the file there; besides JSON, only "
            "comments and trailing commas are allowed."
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"config must be valid JSON, but got brackets nested too deep in {file}. Correct the "
            "file."
        ) from error
    if not isinstance(value, _Object):
        raise ConfigError(
            f"config must be a JSON object, but got {shown(value)} in {file}. Write {{...}} there."
        )
    return value


def _as_strict_json(text: str) -> str:
    """Replace comments and trailing commas with blanks, which keeps lines and columns."""
    # No other HJSON syntax is supported. HJSON reads a malformed line as a string without quotes,
    # so a forgotten comma would turn `"lr": 1 "eps": 2` into a value that nobody wrote.
    text = _COMMENT.sub(lambda match: match[1] or match[2] or re.sub(r"[^\n]", " ", match[0]), text)
    return _TRAILING_COMMA.sub(lambda match: match[1] or " ", text)


def _check_repeated(root: Mapping[object, object], errors: Collector) -> None:
    pending: list[tuple[object, str]] = [(root, "")]
    for value, path in pending:  # which grows
        if isinstance(value, _Object):
            for key, values in value.repeated.items():
                where = join(path, key)
                got = " and ".join(map(shown, values))
                message = f"{where} must be given once, but got {where}={got}. Remove all but one."
                errors.add([ConfigError(message, paths=[where])], compares=False)
            pending += [(inner, join(path, str(key))) for key, inner in value.items()]
        elif isinstance(value, list):
            pending += [
                (inner, f"{path}[{index}]")
                for index, inner in enumerate(cast("list[object]", value))
            ]
