"""The reference of all keys, as text for the command and as Markdown for the page."""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxpipe.errors import ConfigError, cut, near

from ._other_keys import REFUSED, UNUSED
from ._params import Params
from ._section import Section, default_of, join, key_meanings
from ._train import TrainConfig

Names = Mapping[str, str]
"""Maps the path of a key to the names that its value may have, for names of other packages."""

_WIDTH = 96
_PAGE = (
    "The reference of all keys. [Configuration](configuration.md) explains how to set them. In a "
    "terminal, `jaxpipe config KEY` shows one key and `jaxpipe config` shows all.\n\n"
    "<!-- Written by: jaxpipe config --markdown > docs/configuration_keys.md -->"
)
_UNUSED = (
    "DeepSpeed keys that change no number. They are accepted, and a single warning lists them."
)
_REFUSED = (
    "DeepSpeed keys that would change the results, or whether a job fits in memory. They raise an "
    "error, unless the value asks for nothing, such as `false`."
)
_SAYS_RULE = re.compile(r" must be (.*?), but got ", re.DOTALL)


@dataclass(frozen=True)
class _Key:
    """One key: its path, its accepted values, its default as JSON or `required`, its meaning."""

    path: str
    values: str
    default: str
    meaning: str


def reference_text(names: Names, path: str | None = None) -> str:
    """The reference of the configuration, a section or a key as text; `names` as for `main`."""
    if path is None:
        sections = (_section_lines(cls, names) for cls in _sections(TrainConfig))
        others = (
            _described(title, text, {", ".join(keys): why for why, keys in _grouped(found).items()})
            for title, text, found in _others()
        )
        return "\n".join(line for lines in (*sections, *others) for line in lines).rstrip()
    found = _without_aliases(path)
    sections = {cls.path: cls for cls in _sections(TrainConfig)}
    if found and found in sections:
        return "\n".join(_section_lines(sections[found], names)).rstrip()
    keys = {key.path: key for cls in sections.values() for key in _keys(cls, names)}
    if found in keys:
        key = keys[found]
        # The listing of a whole section leaves out the accepted values.
        facts = {"default": key.default, "values": key.values}
        lines = [_filled(f"{name:7}  {text}", 13) for name, text in facts.items()]
        return "\n".join([found, *lines, "", _filled(key.meaning)])
    for title, _, others in _others():
        if found in others:
            return f"{found} ({title.lower()})\n{_filled(others[found])}"
    raise _unknown(path)


def reference_markdown(names: Names) -> str:
    """The reference as a page of Markdown, with one table per section; `names` as for `main`."""
    lines = ["# Configuration keys", "", _PAGE, ""]
    for cls in _sections(TrainConfig):
        rows = [
            (f"`{key.path.rpartition('.')[2]}`", key.values, f"`{key.default}`", key.meaning)
            for key in _keys(cls, names)
        ]
        lines += [f"## {f'`{cls.path}`' if cls.path else 'Outermost keys'}", "", _summary(cls), ""]
        lines += _table(("key", "values", "default", "meaning"), rows)
    for title, text, found in _others():
        rows = [
            (", ".join(f"`{key}`" for key in keys), why) for why, keys in _grouped(found).items()
        ]
        lines += [f"## {title}", "", text, "", *_table(("key", "why"), rows)]
    return "\n".join(lines).rstrip()


def _sections(cls: type[Section]) -> Iterator[type[Section]]:
    """A section and all sections inside it."""
    yield cls
    for item in fields(cls):
        if "section" in item.metadata:
            yield from _sections(item.metadata["section"])


def _keys(cls: type[Section], names: Names) -> Iterator[_Key]:
    """The keys of a section, without the keys of its inner sections."""
    hints = get_type_hints(cls)
    meanings = key_meanings(cls)
    for item in fields(cls):
        path = join(cls.path, item.name)
        values = _values(item, hints[item.name], names.get(path))
        yield _Key(path, values, _default(item), meanings.get(item.name, ""))


def _values(item: Field[Any], hint: Any, names: str | None) -> str:
    """The accepted values of a key, in the words of the error for a wrong value."""
    if "section" in item.metadata:
        return "an object"
    try:
        item.metadata["reader"](object(), item.name)  # no key accepts a bare object
    except ConfigError as error:
        rule = _SAYS_RULE.search(str(error))
    else:
        rule = None
    text = rule[1] if rule else "anything"
    text += f": {names}" if names else ""
    kinds = [*_kinds(hint)]
    # `auto_or` and `optional` accept these before they call their inner reader.
    text += ", or 'auto'" if "auto" in kinds and "'auto'" not in text else ""
    return text + (", or null" if NoneType in kinds else "")


def _kinds(hint: Any) -> Iterator[Any]:
    """The members of a union, with the values of its literals."""
    inner = get_args(hint)
    if get_origin(hint) is Literal or not inner:
        yield from inner or (hint,)
    else:
        for each in inner:
            yield from _kinds(each)


def _default(item: Field[Any]) -> str:
    value = default_of(item)
    if value is MISSING:
        return "required"
    if isinstance(value, Section | Params):
        return "{}"
    return json.dumps(value)


def _others() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Keys that are not settings, with their reasons, under a title and an introduction."""
    unused = {key: _sentence(unused.reason) for key, unused in sorted(UNUSED.items())}
    yield "Without effect", _UNUSED, unused
    refused = {
        key: f"{_sentence(refusal.reason)} {_sentence(refusal.repair)}"
        for key, refusal in sorted(REFUSED.items())
    }
    yield "Refused", _REFUSED, refused


def _grouped(others: Mapping[str, str]) -> dict[str, list[str]]:
    """The keys, grouped by their reason."""
    found: dict[str, list[str]] = {}
    for key, why in others.items():
        found.setdefault(why, []).append(key)
    return found


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _summary(cls: type[Section]) -> str:
    """The part of a section's docstring before the attributes."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\nAttributes:")[0].split())


def _without_aliases(path: str) -> str:
    outer, dot, rest = path.partition(".")
    return TrainConfig.aliases.get(outer, outer) + dot + rest


def _section_lines(cls: type[Section], names: Names) -> list[str]:
    keys = {f"{key.path} = {key.default}": key.meaning for key in _keys(cls, names)}
    return _described(cls.path or "Outermost keys", _summary(cls), keys)


def _described(title: str, text: str, keys: Mapping[str, str]) -> list[str]:
    lines = [title, "-" * len(title), textwrap.fill(text, _WIDTH), ""]
    for head, meaning in keys.items():
        lines += [*textwrap.wrap(head, _WIDTH), _filled(meaning)]
    return [*lines, ""]


def _filled(text: str, hanging: int = 4) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * hanging,
        break_on_hyphens=False,
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    # A vertical bar would end the cell.
    cells = ([text.replace("|", "\\|") for text in line] for line in lines)
    return [*(f"| {' | '.join(line)} |" for line in cells), ""]


def _unknown(path: str) -> ConfigError:
    known = [key.path for cls in _sections(TrainConfig) for key in _keys(cls, {})]
    known += [*UNUSED, *REFUSED]
    # Users often leave out the section of a key.
    words = {key: key if "." in path else key.rpartition(".")[2] for key in known}
    most, cutoff = (1, 0.6) if "." in path else (3, 0.7)
    found = near(path, set(words.values()), most, cutoff)
    keys = [key for word in found for key in known if words[key] == word]
    repair = f"Did you mean {' or '.join(keys)}?" if keys else "Without KEY all keys are listed."
    return ConfigError(f"{cut(path)} is not a known key. {repair}", paths=[path])
