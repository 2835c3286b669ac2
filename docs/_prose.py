"""The language of the pages: proselint, and words that these pages do not use."""

import re
from collections.abc import Iterator

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_OFF = ("lexical_illusions", "needless_variants", "spelling", "typography")
"""Checks of proselint that look at headings and marks, or want American English."""
_WORDS = {
    r"\b[Aa]ll else\b": "everything else",
    r"\b[Bb]eside\b": "next to, or in addition to",
    r"\bso many times as\b": "as many times as",
    r"\b(?:is|are) told\b": "who says it",
    r"\b[Ii]n place of\b": "instead of",
    r"\b[Tt]ill\b": "until",
    r"\b[Tt]hose of (?:that|those|what)\b": "the noun",
    r"\b[Ww]hat (?:lies|stands)\b": "what it is",
}
"""What to look for, and what to write instead."""


def check_prose(app: object, page: str, source: list[str]) -> None:
    """Warn of language on a page that readers stop at.

    Args:
        app: Not used; the arguments are those of `source-read`.
        page: The page's name.
        source: Its text.
    """
    if not page.startswith(("api/", "notebooks/", "changelog")):
        for line, text in findings(source[0]):
            _LOG.warning(text, location=(page, line), type="prose")


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Each line, counted from 1, at which a reader would stop, with the reason."""
    prose = _without_code(text)
    for pattern, better in _WORDS.items():
        for found in re.finditer(pattern, prose):
            line = prose.count("\n", 0, found.start()) + 1
            yield line, f"{found[0]!r}: write {better}"
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    checks: dict[str, bool] = {**DEFAULT["checks"], **dict.fromkeys(_OFF, False)}
    config = {**DEFAULT, "checks": checks}
    for each in LintFile("page.md", prose).lint(config):  # pyright: ignore[reportArgumentType]
        line, _ = each.pos
        yield line, each.check_result.message


def _without_code(text: str) -> str:
    """The text with everything that is not prose blanked out, lines where they were."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    code = r"^(`{3,}|:{3,}).*?^\1", r"`[^`]+`", r"\]\([^)]*\)", r"<[^>\n]+>", r"\$[^$\n]+\$"
    for pattern in code:
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL)
    return text
