"""The reference of the configuration, written from the docstrings and fields of the sections."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from jaxpipe.config import TrainConfig
from jaxpipe.config._other_keys import REFUSED, UNUSED
from jaxpipe.config._section import Section


def write_configuration(file: Path) -> None:
    """Write the tables of all keys.

    Args:
        file: The Markdown file, which `configuration.md` includes.
    """
    file.parent.mkdir(exist_ok=True)
    lines = [*_sections(TrainConfig), *_others()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(cls: type[Section]) -> Iterator[str]:
    meanings = _attributes(cls)
    yield from (f"## {f'`{cls.path}`' if cls.path else 'Outermost keys'}", "")
    text = inspect.cleandoc(cls.__doc__ or "").split("\nAttributes:")[0]
    yield from (_markdown(text), "")
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    inner: list[type[Section]] = []
    for item in fields(cls):
        if "section" in item.metadata:
            inner.append(item.metadata["section"])
        # A vertical bar would end the cell.
        kind = _type(item).replace("|", "or")
        yield f"| `{item.name}` | {kind} | {_default(item)} | {_markdown(meanings[item.name])} |"
    yield ""
    for section in inner:
        yield from _sections(section)


def _attributes(cls: type[Section]) -> dict[str, str]:
    text = inspect.cleandoc(cls.__doc__ or "")
    block = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    entries = re.split(r"^    (?=\w+: )", block[1] if block else "", flags=re.MULTILINE)[1:]
    pairs = (entry.split(": ", 1) for entry in entries)
    return {name: " ".join(meaning.split()) for name, meaning in pairs}


def _type(item: Field[Any]) -> str:
    if "section" in item.metadata:
        return "object"
    annotation = item.type if isinstance(item.type, str) else inspect.formatannotation(item.type)
    return annotation.replace("typing.", "").replace("jaxpipe.config._params.", "")


def _default(item: Field[Any]) -> str:
    if "section" in item.metadata:
        return "absent"
    if item.default is MISSING:
        return "required"
    return "{}" if item.name == "params" else f"`{item.default!r}`"


def _others() -> Iterator[str]:
    yield from ("## Keys without effect", "")
    yield from ("Keys of DeepSpeed that change no number. They are accepted, and named in one warning.", "")
    yield from ("| key | why |", "|---|---|")
    yield from (f"| `{key}` | {_markdown(unused.reason)} |" for key, unused in sorted(UNUSED.items()))
    yield from ("", "## Keys that are refused", "")
    yield from ("Keys of DeepSpeed that would change results, or what fits. Values that ask for nothing pass.", "")
    yield from ("| key | why | instead |", "|---|---|---|")
    for key, refusal in sorted(REFUSED.items()):
        yield f"| `{key}` | {_markdown(refusal.reason)} | {_markdown(refusal.repair)} |"


def _markdown(text: str) -> str:
    return text.replace("|", "\\|")
