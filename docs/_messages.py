"""The messages of the package, for the page that explains them."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import jaxpipe

ENTRY = re.compile(r"^(`+)(.+?)\1(?: \((\w+)\))?(?=\n: )", re.MULTILINE)
"""An entry of the page on messages: a part of one, and whose it is if not this package's."""


@functools.cache
def messages() -> tuple[str, ...]:
    """All texts in the package's code, with `…` where a value is filled in; no docstrings."""
    files = sorted(Path(jaxpipe.__file__).parent.rglob("*.py"))
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return tuple(dict.fromkeys(text for tree in trees for text in _texts(tree)))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[.\d]*[sdfg]", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )
        if not isinstance(node, ast.JoinedStr):
            yield from _texts(node)


def show_messages(app: object, page: str, source: list[str]) -> None:
    """Replace each part of a message on the page on troubleshooting by the whole message.

    Args:
        app: Not used; the arguments are those of `source-read`.
        page: The page's name.
        source: Its text, which is replaced.

    Raises:
        ValueError: No message of the package has such a part.
    """
    if page == "troubleshooting":
        source[0] = ENTRY.sub(_whole, source[0])


def _whole(entry: re.Match[str]) -> str:
    part, owner = entry[2], entry[3]
    if owner:
        return entry[0]
    found = [text for text in messages() if part in text]
    if not found:
        raise ValueError(f"no message of the package has {part!r}")
    # Where several messages have it, the part is what they share.
    text = " ".join(found[0].split()) if len(found) == 1 else f"…{part}…"
    return f"`` {text} ``"
