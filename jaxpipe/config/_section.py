"""The base class of all sections of the configuration, and the function that reads one."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from jaxpipe._util.numbers import as_flag, plain
from jaxpipe.errors import ConfigError, cut, nearest, shown

from ._collect import Collector
from ._other_keys import REFUSED, UNUSED, Refusal, Unused, is_off
from ._values import Reader, wrong_value

S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Section:
    """One JSON object of a configuration: a frozen dataclass whose fields are its keys.

    A subclass declares each key with `required`, `setting` or `subsection`. Every instance is
    checked key by key, whether it is read from JSON or created with keywords. Rules between keys
    belong in `check`. All errors are raised together. Keys in `UNUSED`, `REFUSED` and `other_keys`
    are not fields.

    Attributes:
        path: JSON path of the section in the configuration.
        aliases: Other names of its keys.
        switch: The key that must be true for the others to have an effect, or None.
        other_keys: Keys that have no effect or are refused, beside those of DeepSpeed's file.
    """

    path: ClassVar[str] = ""
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    switch: ClassVar[str | None] = None
    other_keys: ClassVar[Mapping[str, Unused | Refusal]] = MappingProxyType({})

    def __post_init__(self) -> None:
        errors = Collector()
        for item in fields(self):
            value = _read_value(item, getattr(self, item.name), join(self.path, item.name), errors)
            # The dataclass is frozen, but readers convert values: a list becomes a tuple, so that
            # the section can be hashed.
            object.__setattr__(self, item.name, value)
        if not any(getattr(self, item.name) is MISSING for item in fields(self)):
            self._complete()
            errors.add(self.check())
        errors.raise_all()

    def check(self) -> Iterable[ConfigError]:
        """Errors for values that are valid on their own but contradict each other.

        Each error has the paths of all keys that are involved.
        """
        return ()

    def _complete(self) -> None:
        """Set fields whose defaults depend on other fields."""

    def _wrong(self, name: str, rule: str, repair: str) -> ConfigError:
        return wrong_value(join(self.path, name), rule, getattr(self, name), repair)


def setting(
    default: Any,
    reader: Reader,
    *,
    is_secret: bool = False,
    is_hidden: bool = False,
    compare: bool = True,
) -> Any:
    """Declare a key of a section, with a reader that checks and converts its value.

    A secret value is neither shown nor stored. A hidden one can be set from Python only.
    """
    metadata = {"reader": reader, "is_hidden": is_hidden}
    return field(default=default, repr=not is_secret, compare=compare, metadata=metadata)


def without_secrets(section: S) -> S:
    """A copy of a section that may be shown and stored, with defaults for secret values."""
    inner = {x.name: getattr(section, x.name) for x in fields(section) if "section" in x.metadata}
    changes = {name: without_secrets(value) for name, value in inner.items() if value is not None}
    return replace(section, **changes, **{x.name: x.default for x in fields(section) if not x.repr})


def required(reader: Reader) -> Any:
    """Declare a required key. The reader checks and converts its value."""
    return field(metadata={"reader": reader})


def subsection(cls: type[Section], *, absent: bool = False, instead: Reader | None = None) -> Any:
    """Declare a key that holds an object. With `absent` the default is None, JSON's `null`."""

    def read(value: object, path: str) -> Section | None:
        if isinstance(value, cls) or (absent and value is None):
            return value
        # `instead` raises a better error.
        if instead is not None:
            instead(value, path)
        keys = ", ".join(key.name for key in fields(cls))
        raise wrong_value(
            path, "a JSON object", value, f"Use an object with any of the keys {keys}"
        )

    metadata = {"reader": read, "section": cls}
    return (
        field(default=None, metadata=metadata)
        if absent
        else field(default_factory=cls, metadata=metadata)
    )


def key_meanings(cls: type[Section]) -> dict[str, str]:
    """The meaning of each key of a section, in one line, from the attributes in its docstring."""
    # No docstring if Python runs without them.
    text = inspect.cleandoc(cls.__doc__ or "")
    block = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.split(r"^    (?=\w+: )", block[1] if block else "", flags=re.MULTILINE)[1:]
    pairs = (entry.split(": ", 1) for entry in entries)
    return {name: " ".join(meaning.split()) for name, meaning in pairs}


def with_inner_keys(cls: type[S]) -> type[S]:
    """Add the keys of all inner sections, with their meanings, to a section's docstring."""
    found = "\n\n".join(textwrap.fill(text, 96) for text in _inner_keys(cls))
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nKeys of the sections:\n\n{found}\n"
    return cls


def _inner_keys(cls: type[Section]) -> Iterator[str]:
    for outer in fields(cls):
        section: type[Section] | None = outer.metadata.get("section")
        if section is None:
            continue
        meanings = key_meanings(section)
        for item in fields(section):
            if "section" not in item.metadata:
                value = default_of(item)
                default = "required" if value is MISSING else f"default {shown(value)}"
                yield f"{join(section.path, item.name)} ({default}): {meanings.get(item.name, '')}"
        yield from _inner_keys(section)


def read_section(
    cls: type[S],
    mapping: Mapping[object, object],
    path: str,
    errors: Collector,
    hidden: Mapping[str, object] = MappingProxyType({}),
) -> S | None:
    """Read one JSON object, and use the default instead of each wrong value.

    `errors` collects everything that is wrong. `hidden` has values of hidden keys. Returns None if
    a key without a default is wrong.
    """
    every = {item.name: item for item in fields(cls)}
    known = {name: every[name] for name in key_names(cls)}
    values: dict[str, Any] = {
        name: _read_value(every[name], value, join(path, name), errors)
        for name, value in hidden.items()
    }
    off = _is_switched_off(cls, mapping)
    # A section that is explicitly off uses none of its values, so their errors are ignored. A
    # section without its switch may be meant to be on.
    says_off = mapping.get(cls.switch, True) is False
    for key, value in mapping.items():
        with errors.catch():
            name = cls.aliases.get(checked_key(key, path), str(key))
            if name not in known:
                if not (says_off and isinstance(_other_key(cls, name), Unused)):
                    _check_other_key(cls, name, value, path, errors, off=off)
                continue
            if name in values:
                raise _given_twice(cls, mapping, name, path)
            found = Collector() if says_off and name != cls.switch else errors
            values[name] = _read_value(known[name], value, join(path, str(key)), found)
    for name, item in every.items():
        if name not in values:
            values[name] = default_of(item)
            if values[name] is MISSING:
                errors.add([missing_key(path, name, mapping)])
    if any(value is MISSING for value in values.values()):
        return None
    # Set the fields without calling the class: after a wrong value its `check` would raise, but the
    # section still has to be compared with others.
    section = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(section, name, value)
    errors.add(section.check())
    return section


def read_whole(
    cls: type[S],
    mapping: Mapping[Any, object],
    hidden: Mapping[str, object] = MappingProxyType({}),
) -> S:
    """Read one JSON object as `read_section` does, and raise everything that is wrong."""
    errors = Collector()
    found = read_section(cls, mapping, cls.path, errors, hidden)
    errors.raise_all()
    # Made again by the class, which may derive values.
    return replace(cast("S", found))


def idle_keys(
    cls: type[Section], mapping: Mapping[object, object], path: str = ""
) -> Iterator[tuple[str, str]]:
    """The path and reason of each key in a valid JSON object that has no effect."""
    inner = {
        item.name: item.metadata["section"] for item in fields(cls) if "section" in item.metadata
    }
    off = _is_switched_off(cls, mapping)
    for key, value in mapping.items():
        name = cls.aliases.get(str(key), str(key))
        where = join(path, str(key))
        other = _other_key(cls, name)
        asks = name != cls.switch and not is_off(value, other.off if other else (False,))
        if off and asks:
            yield where, f"without {join(path, str(cls.switch))}=true the section is off"
        elif isinstance(other, Unused) and asks:
            yield where, other.reason
        elif name in inner and isinstance(value, Mapping):
            yield from idle_keys(inner[name], cast("Mapping[object, object]", value), where)


def join(path: str, key: str) -> str:
    """The path of a key in the object at `path`, which is empty for the outermost object."""
    # A long key, which is unknown, is cut, so that errors stay readable.
    return f"{path}.{cut(key)}" if path else cut(key)


def _read_value(item: Field[Any], value: object, path: str, errors: Collector) -> Any:
    """The value of a key. If it is wrong, its default, or `MISSING` without one."""
    section: type[Section] | None = item.metadata.get("section")
    with errors.catch():
        if section is not None and isinstance(value, Mapping):
            return read_section(section, cast("Mapping[object, object]", value), path, errors)
        return item.metadata["reader"](plain(value), path)
    return default_of(item)


def default_of(item: Field[Any]) -> Any:
    """The value of an absent key, or `MISSING` if the key is required."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _is_switched_off(cls: type[Section], mapping: Mapping[object, object]) -> bool:
    return cls.switch is not None and as_flag(mapping.get(cls.switch, False)) is False


def checked_key(key: object, path: str) -> str:
    """Refuse a key that is not a string."""
    if isinstance(key, str):
        return key
    raise ConfigError(
        f"A key of {path or 'the configuration'} must be a string, but got key={shown(key)}. Write "
        "it in quotes.",
        paths=[join(path, shown(key))],
    )


def _given_twice(
    cls: type[Section], mapping: Mapping[object, object], name: str, path: str
) -> ConfigError:
    names = [
        other
        for other in mapping
        if isinstance(other, str) and cls.aliases.get(other, other) == name
    ]
    got = " and ".join(f"{join(path, other)}={shown(mapping[other])}" for other in names)
    return ConfigError(
        f"{join(path, name)} must be given under one name, but got {got}. Keep one of them.",
        paths=[join(path, other) for other in names],
    )


def _check_other_key(
    cls: type[Section], key: str, value: object, path: str, errors: Collector, *, off: bool
) -> None:
    where = join(path, key)
    other = _other_key(cls, key)
    if other is None:
        near = None if errors.is_long else _nearest(cls, key)
        if near:
            errors.mark(join(path, near))
        raise unknown_key(path, key, near, key_names(cls))
    if is_off(value, other.off):
        return
    if isinstance(other, Unused):
        other.reader(value, where)
    elif not (off and other.can_idle):
        raise ConfigError(
            f"{where} must not be set: {other.reason}, but got {where}={shown(value)}. "
            f"{other.repair}.",
            paths=[where],
        )


def _other_key(cls: type[Section], name: str) -> Unused | Refusal | None:
    own = join(cls.path, name)
    return cls.other_keys.get(name) or UNUSED.get(own) or REFUSED.get(own)


def unknown_key(path: str, key: str, near: str | None, names: Iterable[str]) -> ConfigError:
    """Error for a key that the object at `path` does not have; `near` is the one that was meant."""
    listed = ", ".join(join(path, name) for name in names)
    repair = f"Did you mean {join(path, near)}?" if near else f"Remove it, or use one of {listed}."
    where = join(path, key)
    return ConfigError(f"{where} is not a known key. {repair}", paths=[where])


def missing_key(path: str, key: str, given: object) -> ConfigError:
    """Error for a key without a default that the object at `path` lacks."""
    where = join(path, key)
    message = f"{where} must be given, but got {path}={shown(given)}. Add the key {key!r} there."
    return ConfigError(message, paths=[where])


def key_names(cls: type[Section]) -> list[str]:
    """Names of the keys that JSON can set."""
    return [item.name for item in fields(cls) if not item.metadata.get("is_hidden")]


def _nearest(cls: type[Section], key: str) -> str | None:
    """The known key nearest to an unknown one, relative to its section."""
    candidates = _other_keys(cls)
    for item in fields(cls):
        if "section" in item.metadata:
            inner: type[Section] = item.metadata["section"]
            keys = (*(key.name for key in fields(inner)), *_other_keys(inner))
            candidates = {name: f"{item.name}.{name}" for name in keys} | candidates
    # Last, so that a key of the section itself wins over a key of the same name in an inner one.
    candidates |= {name: name for name in (*cls.aliases, *key_names(cls))}
    near = nearest(key, candidates, cutoff=0.7)
    return candidates[near] if near else None


def _other_keys(cls: type[Section]) -> dict[str, str]:
    """Keys of a section that are not fields."""
    names = [other.rpartition(".") for other in (*UNUSED, *REFUSED)]
    found = {name: name for parent, _, name in names if parent == cls.path}
    return found | {name: name for name in cls.other_keys}
