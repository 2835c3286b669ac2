"""From a file or a dictionary to the configuration."""

import json
import re
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from jaxpipe._files import read_file
from jaxpipe._paths import local_path
from jaxpipe.errors import ConfigError, shown

from ._classes import TrainingConfig
from ._collect import Collector
from ._section import idle_keys, join, read_section
from ._train import TrainConfig

# Texts first in both, so that what looks like a comment or a comma inside one is passed over. What
# nobody ended counts to its end, so that nothing is read twice; JSON refuses it there.
_TEXT = r'"(?:[^"\\]|\\.)*+"?'
_COMMENT = re.compile(rf"({_TEXT})|#[^\n]*|//[^\n]*|/\*.*?\*/|(/\*.*)", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_TEXT}|[\[{{,:]\s*,)|,(?=\s*[}}\]])", re.DOTALL)
_MOST_BYTES = 1 << 26


class ConfigWarning(UserWarning):
    """Settings are accepted and have no effect."""


def load_config(
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None,
    errors: Collector | None = None,
) -> TrainConfig:
    """Read the configuration.

    Every key is checked: one that is misspelt or that DeepSpeed knows and this library does not is
    an error, never ignored, unless its value asks for nothing, as in `"elasticity": {"enabled":
    false}`. All that is wrong comes in one error. Keys that change no number, because they tune
    PyTorch, measure or report, are accepted, with one `ConfigWarning` for all of them.

    A file is JSON, with comments (`#`, `//`, `/* */`) and commas before a closing bracket as in
    HJSON.

    Args:
        config: A dictionary, the path of a JSON file, a `TrainConfig` (returned as it is), a
            `TrainingConfig`, or None for all defaults.
        errors: Gets what is wrong with single keys instead of an error here, to be raised with what
            is found later.

    Returns:
        The configuration; with `errors`, the default stands in the place of each wrong value.

    Raises:
        ConfigError: The file cannot be read or is not JSON; or keys are given twice, are unknown or
            refused, or values are of the wrong type or out of range.
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
    if isinstance(config, TrainingConfig):
        with errors.catch():
            return config.to_train_config()
        return TrainConfig()
    if isinstance(config, Mapping):
        return _read(cast("Mapping[object, object]", config), errors)
    if not isinstance(config, str | PathLike):
        raise ConfigError(
            "config must be a dictionary or the path of a JSON file, but got "
            f"config={shown(config)}. Pass a dict, a str or a pathlib.Path."
        )
    file = local_path(cast("str | PathLike[str]", config), "config")
    mapping = _parse(file)
    errors.source = str(file)
    return _read(mapping, errors)


def _read(mapping: Mapping[object, object], errors: Collector) -> TrainConfig:
    try:
        _check_repeated(mapping, errors)
        config = read_section(TrainConfig, mapping, "", errors)
    except RecursionError as error:
        raise ConfigError(
            "config must be nested as far as JSON is at most, but got an object inside itself, or "
            "hundreds of levels. Give a dictionary of plain values."
        ) from error
    _warn_of_idle_keys(mapping, errors)
    return TrainConfig() if config is None else config


def _warn_of_idle_keys(mapping: Mapping[object, object], errors: Collector) -> None:
    # A warning beside errors would be read first; it comes when they are mended.
    if not errors.is_clear:
        return
    paths_of: dict[str, list[str]] = {}
    for path, reason in idle_keys(TrainConfig, mapping):
        paths_of.setdefault(reason, []).append(path)
    if paths_of:
        lines = "".join(
            f"\n  - {', '.join(paths)}: {reason}." for reason, paths in paths_of.items()
        )
        warnings.warn(
            "The configuration sets keys that have no effect and change no number; remove them to "
            f"silence this warning:{lines}",
            ConfigWarning,
            stacklevel=5,
        )


class _Object(dict[object, object]):
    """A JSON object that remembers which of its keys came more than once, with all their values."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        # Told later, with the path, which the parser does not know here.
        self.repeated: dict[str, list[object]] = {}
        if len(self) < len(pairs):
            for key, value in pairs:
                self.repeated.setdefault(key, []).append(value)
            self.repeated = {
                key: values for key, values in self.repeated.items() if len(values) > 1
            }


class _LongNumber:
    """An integer of more digits than Python reads.

    No reader takes it, so it is refused at its path.
    """

    def __init__(self, digits: str) -> None:
        self._digits = digits

    def __repr__(self) -> str:
        return f"{self._digits[:10]}... ({len(self._digits.lstrip('-'))} digits)"


def _integer(digits: str) -> object:
    try:
        # Python refuses more than 4300 digits, with an error that has neither key nor line.
        return int(digits)
    except ValueError:
        return _LongNumber(digits)


def _parse(file: Path) -> _Object:
    """The JSON object that a file holds."""
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
            f"column {error.colno}. Correct the file there; beyond JSON only comments and trailing "
            "commas are read."
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
    """JSON with blanks in place of comments and trailing commas, so that lines and columns stay."""
    # Nothing else of HJSON: where it finds no JSON it takes the rest of the line for a text without
    # quotes, so that a forgotten comma would turn `"lr": 1 "eps": 2` into something nobody has
    # written.
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
