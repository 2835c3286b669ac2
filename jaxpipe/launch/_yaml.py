"""Writing YAML."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/_][A-Za-z0-9/_.-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def to_yaml(value: Any) -> str:
    """Write a document in block style.

    Args:
        value: Mappings with text keys, sequences, text, whole numbers and truth values.

    Returns:
        Its lines, with an end to the last.
    """
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        lines = []
        for key, inner in value.items():
            lines += _entry(f"{_scalar(key)}:", inner, is_item=False)
        return lines
    if _is_sequence(value) and value:
        lines = []
        for inner in value:
            lines += _entry("-", inner, is_item=True)
        return lines
    return [_scalar(value)]


def _entry(head: str, value: Any, *, is_item: bool) -> list[str]:
    inner = _lines(value)
    if not (isinstance(value, Mapping) or _is_sequence(value)) or not value:
        return [f"{head} {inner[0]}"]
    if is_item:
        return [f"- {inner[0]}", *(f"  {line}" for line in inner[1:])]
    return [head, *(f"  {line}" for line in inner)]


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if _is_sequence(value):
        return "[]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in plain) + '"'


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
