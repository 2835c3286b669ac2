"""Every key of the configuration, from its dataclasses.

A new one is tested without being written down here.
"""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxpipe.config import TrainConfig


class Key(NamedTuple):
    """One key.

    Attributes:
        kinds: The types of its value; in place of those that are spelled out, such as `"auto"`, the
            values themselves.
        default: Its default.
        is_section: True if it holds an object.
    """

    kinds: frozenset[Any]
    default: Any
    is_section: bool

    def kind(self) -> Any:
        """The one type of its value beside None and `"auto"`; None where there are several."""
        plain = {
            str if isinstance(kind, str) else kind for kind in self.kinds - {types.NoneType, "auto"}
        }
        return next(iter(plain)) if len(plain) == 1 else None

    def names(self) -> list[str]:
        """The values that are spelled out, beside `"auto"`."""
        return sorted(kind for kind in self.kinds - {"auto"} if isinstance(kind, str))


def _kinds(hint: Any) -> Iterator[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        for inner in get_args(hint):
            yield from _kinds(inner)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        yield get_origin(hint) or hint


def _keys(cls: type, outer: str = "") -> Iterator[tuple[str, Key]]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        path, section = f"{outer}{item.name}", item.metadata.get("section")
        yield path, Key(frozenset(_kinds(hints[item.name])), item.default, section is not None)
        if section is not None:
            yield from _keys(section, f"{path}.")


KEYS = dict(_keys(TrainConfig))
"""By their paths."""
