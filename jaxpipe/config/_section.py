"""What all sections of the configuration have in common."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar, cast

from jaxpipe.errors import ConfigError

from ._refused import REFUSED
from ._values import Reader, shown, wrong_value

S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Section:
    """One JSON object of the configuration: a frozen dataclass whose fields are its keys.

    A subclass declares each key with `setting` or `subsection`, and is checked key by key whenever it is made,
    whether from JSON or by keyword.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = item.metadata["reader"](getattr(self, item.name), _join(self.path, item.name))
            object.__setattr__(self, item.name, value)


def setting(default: Any, reader: Reader) -> Any:
    """Declare a key of a section.

    Args:
        default: Its value where the key is absent.
        reader: Checks and converts its value.

    Returns:
        A dataclass field.
    """
    return field(default=default, metadata={"reader": reader})


def subsection(cls: type[Section]) -> Any:
    """Declare a key that holds an object.

    Args:
        cls: The object's section.

    Returns:
        A dataclass field, by default the section with all its defaults.
    """

    def read(value: object, path: str) -> Section:
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            keys = ", ".join(key.name for key in fields(cls))
            raise wrong_value(path, "a JSON object", value, f"Use an object with any of the keys {keys}")
        return read_section(cls, cast("Mapping[object, object]", value))

    return field(default_factory=cls, metadata={"reader": read, "section": cls})


def read_section(cls: type[S], mapping: Mapping[object, object]) -> S:
    """Read one JSON object.

    Args:
        cls: The section it holds.
        mapping: The object.

    Returns:
        The section.

    Raises:
        ConfigError: A key is unknown or refused, or a value is of the wrong type or out of range.
    """
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            where = cls.path or "the configuration"
            raise ConfigError(f"A key of {where} must be a string, but got key={key!r}. Write it in quotes.")
        _check_key(cls, key, value)
        values[key] = value
    return cls(**values)


def _check_key(cls: type[Section], key: str, value: object) -> None:
    known = {item.name: item.name for item in fields(cls)}
    if key in known:
        return
    path = _join(cls.path, key)
    if path in REFUSED:
        reason, repair = REFUSED[path]
        raise ConfigError(f"{path} must not be set: {reason}, but got {path}={shown(value)}. {repair}.")
    refused = {other.removeprefix(_join(cls.path, "")) for other in REFUSED if _parent(other) == cls.path}
    deeper = {name: other for name, other in _nested_keys(cls).items() if name not in known}
    for candidates in (known, deeper, {name: name for name in refused}):
        near = get_close_matches(key, candidates, n=1, cutoff=0.7)
        if near:
            raise ConfigError(f"{path} is not a known key. Did you mean {_join(cls.path, candidates[near[0]])}?")
    names = ", ".join(_join(cls.path, name) for name in known)
    raise ConfigError(f"{path} is not a known key. Remove it, or use one of {names}.")


def _nested_keys(cls: type[Section]) -> dict[str, str]:
    """Keys of the objects inside a section, with their paths from the section."""
    keys: dict[str, str] = {}
    for item in fields(cls):
        if "section" in item.metadata:
            inner: type[Section] = item.metadata["section"]
            keys |= {key.name: f"{item.name}.{key.name}" for key in fields(inner)}
    return keys


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
