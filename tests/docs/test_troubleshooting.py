"""The messages that the page on troubleshooting quotes are those of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxpipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^(`+)(.+?)\1(?: \((\w+)\))?\n: ", PAGE, re.MULTILINE)
OWN = [quoted for _, quoted, owner in ENTRIES if not owner]
OTHERS = {"JAX", "XLA", "Gloo", "pip"}


def literals(tree: ast.AST) -> Iterator[str]:
    """The parts of strings that stand in the code, of adjacent ones as one; without docstrings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from literals(node)


@pytest.fixture(scope="module")
def package() -> list[str]:
    files = sorted(Path(jaxpipe.__file__).parent.rglob("*.py"))
    return [
        text for path in files for text in literals(ast.parse(path.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize("quoted", OWN)
def test_a_quoted_message_is_in_the_package(quoted: str, package: list[str]) -> None:
    assert len(quoted) >= 12
    assert any(quoted in text for text in package)


def test_every_entry_is_read() -> None:
    lines = PAGE.splitlines()
    heads = [
        before for before, line in zip(lines, lines[1:], strict=False) if line.startswith(": ")
    ]
    assert len(heads) == len(ENTRIES) >= 40
    assert len({quoted for _, quoted, _ in ENTRIES}) == len(ENTRIES)
    assert {owner for *_, owner in ENTRIES if owner} == OTHERS
