"""The messages that the page on troubleshooting quotes are those of the code."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import _messages  # noqa: E402

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = _messages.ENTRY.findall(PAGE)
OTHERS = {"JAX", "XLA", "Gloo", "pip"}


def test_a_quoted_message_is_in_the_package() -> None:
    for quoted in [quoted for _, quoted, owner in ENTRIES if not owner]:
        assert len(quoted) >= 12
        assert any(quoted in text for text in _messages.messages())


def test_the_site_shows_whole_messages() -> None:
    source = ["`Did you mean another `\n: Nothing.\n\n`so JAX says` (JAX)\n: x\n"]
    with pytest.raises(ValueError, match="no message of the package has 'Did you mean another '"):
        _messages.show_messages(None, "troubleshooting", source)
    source = ["`must lie on a file system of this machine`\n: x\n\n`so JAX says` (JAX)\n: x\n"]
    _messages.show_messages(None, "index", source)
    assert source[0].startswith("`must lie")
    _messages.show_messages(None, "troubleshooting", source)
    assert source[0].startswith(
        "`` … must lie on a file system of this machine, but got …=…, and …:// is none."
    )
    assert source[0].endswith("``\n: x\n\n`so JAX says` (JAX)\n: x\n")


def test_every_entry_is_read() -> None:
    lines = PAGE.splitlines()
    heads = [
        before for before, line in zip(lines, lines[1:], strict=False) if line.startswith(": ")
    ]
    assert len(heads) == len(ENTRIES) >= 40
    assert len({quoted for _, quoted, _ in ENTRIES}) == len(ENTRIES)
    assert {owner for *_, owner in ENTRIES if owner} == OTHERS
