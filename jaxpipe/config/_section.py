"""What all sections of the configuration have in common."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from jaxpipe.errors import ConfigError

from ._refused import REFUSED
from ._unused import UNUSED
from ._values import Reader, shown, wrong_value

S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Section:
    """One JSON object of the configuration: a frozen dataclass whose fields are its keys.

    A subclass declares each key with `required`, `setting` or `subsection`, and is checked key by key whenever it is
    made, whether from JSON or by keyword; what ties keys to each other goes into `check`. Keys of `UNUSED` and
    `REFUSED` are no fields.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or values contradict each other.
    """

    path: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __post_init__(self) -> None:
        for item in fields(self):
            value = item.metadata["reader"](getattr(self, item.name), join(self.path, item.name))
            object.__setattr__(self, item.name, value)
        self.check()

    def check(self) -> None:
        """Check the values against each other; each is already right by itself."""


def setting(default: Any, reader: Reader) -> Any:
    """Declare a key of a section.

    Args:
        default: Its value where the key is absent.
        reader: Checks and converts its value.

    Returns:
        A dataclass field.
    """
    return field(default=default, metadata={"reader": reader})


def required(reader: Reader) -> Any:
    """Declare a key that must be there.

    Args:
        reader: Checks and converts its value.

    Returns:
        A dataclass field without a default.
    """
    return field(metadata={"reader": reader})


def subsection(cls: type[Section], *, absent: bool = False, instead: Reader | None = None) -> Any:
    """Declare a key that holds an object.

    Args:
        cls: The object's section.
        absent: Whether the default is None, for which null may be written, and not the section with its defaults.
        instead: Called with a value that is no object, to raise a better error.

    Returns:
        A dataclass field.
    """

    def read(value: object, path: str) -> Section | None:
        if isinstance(value, cls) or (absent and value is None):
            return value
        if not isinstance(value, Mapping):
            if instead is not None:
                instead(value, path)
            keys = ", ".join(key.name for key in fields(cls))
            raise wrong_value(path, "a JSON object", value, f"Use an object with any of the keys {keys}")
        return read_section(cls, cast("Mapping[object, object]", value), path)

    metadata = {"reader": read, "section": cls}
    return field(default=None, metadata=metadata) if absent else field(default_factory=cls, metadata=metadata)


def read_section(cls: type[S], mapping: Mapping[object, object], path: str | None = None) -> S:
    """Read one JSON object.

    Args:
        cls: The section it holds.
        mapping: The object.
        path: Where it stands, for errors; None: at the section's own path.

    Returns:
        The section.

    Raises:
        ConfigError: A key is unknown or refused, missing or given under two names, or a value is of the wrong type or
            out of range.
    """
    path = cls.path if path is None else path
    known = {item.name: item for item in fields(cls)}
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            where = path or "the configuration"
            raise ConfigError(f"A key of {where} must be a string, but got key={key!r}. Write it in quotes.")
        name = cls.aliases.get(key, key)
        if name not in known:
            _check_other_key(cls, key, value, path)
            continue
        if name in values:
            names = [other for other in mapping if isinstance(other, str) and cls.aliases.get(other, other) == name]
            got = " and ".join(f"{join(path, other)}={shown(mapping[other])}" for other in names)
            raise ConfigError(f"{join(path, name)} must be given under one name, but got {got}. Keep one of them.")
        values[name] = known[name].metadata["reader"](value, join(path, key))
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(
                f"{join(path, name)} must be given, but got {path}={shown(mapping)}. Add the key {name!r} there."
            )
    return cls(**values)


def unused_keys(cls: type[Section], mapping: Mapping[object, object], path: str = "") -> list[str]:
    """The keys of a valid JSON object that have no effect.

    Args:
        cls: The section the object holds.
        mapping: The object.
        path: Where it stands.

    Returns:
        Their paths.
    """
    inner = {item.name: item.metadata["section"] for item in fields(cls) if "section" in item.metadata}
    found: list[str] = []
    for key, value in mapping.items():
        name = cls.aliases.get(str(key), str(key))
        where = join(path, str(key))
        if join(cls.path, name) in UNUSED:
            found.append(where)
        elif name in inner and isinstance(value, Mapping):
            found += unused_keys(inner[name], cast("Mapping[object, object]", value), where)
    return found


def join(path: str, key: str) -> str:
    """The path of a key.

    Args:
        path: Path of the object that holds it; empty for the outermost.
        key: The key.

    Returns:
        Both, with a dot between.
    """
    return f"{path}.{key}" if path else key


def _check_other_key(cls: type[Section], key: str, value: object, path: str) -> None:
    own, where = join(cls.path, key), join(path, key)
    if own in UNUSED:
        UNUSED[own](value, where)
        return
    if own not in REFUSED:
        raise ConfigError(f"{where} is not a known key. {_nearest(cls, key, path)}")
    refusal = REFUSED[own]
    if not refusal.allows(value):
        raise ConfigError(
            f"{where} must not be set: {refusal.reason}, but got {where}={shown(value)}. {refusal.repair}."
        )


def _nearest(cls: type[Section], key: str, path: str) -> str:
    """What to write for a key that is unknown."""
    names = [item.name for item in fields(cls)]
    candidates = _other_keys(cls)
    for item in fields(cls):
        if "section" in item.metadata:
            inner: type[Section] = item.metadata["section"]
            keys = (*(key.name for key in fields(inner)), *_other_keys(inner))
            candidates = {name: f"{item.name}.{name}" for name in keys} | candidates
    candidates |= {name: name for name in (*cls.aliases, *names)}
    near = get_close_matches(key, candidates, n=1, cutoff=0.7)
    if near:
        return f"Did you mean {join(path, candidates[near[0]])}?"
    return f"Remove it, or use one of {', '.join(join(path, name) for name in names)}."


def _other_keys(cls: type[Section]) -> dict[str, str]:
    """Keys of a section that are no fields."""
    names = [other.rpartition(".") for other in (*UNUSED, *REFUSED)]
    return {name: name for parent, _, name in names if parent == cls.path}
