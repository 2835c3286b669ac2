"""Faults of pages that a reader would see: markup left over, and text outside its picture."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

_VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_CODE = {"code", "pre", "script", "style", "title"}


def faults_of_site(folder: Path) -> list[str]:
    """Each fault of the pages and pictures below a folder, with its file."""
    paths = sorted((*folder.rglob("*.html"), *folder.rglob("*.svg")))
    return [
        f"{path.relative_to(folder)}: {fault}"
        for path in paths
        if "_modules" not in path.parts and "_static" not in path.parts
        for fault in faults(path.read_text(encoding="utf-8"))
    ]


def faults(text: str) -> Iterator[str]:
    """Each fault of a page or a picture."""
    page = _Page()
    page.feed(text)
    page.close()
    yield from page.found


class _Page(HTMLParser):
    """Reads a page, and finds back-ticks outside code and text outside the picture around it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self._open}
        if "`" in data and not tags & _CODE:
            self.found.append(f"a back-tick in {' '.join(data.split())[:80]!r}")
        if self._open and self._open[-1][0] == "text":
            self._check_place(data)

    def _check_place(self, words: str) -> None:
        own = self._open[-1][1]
        picture = next((attrs for tag, attrs in reversed(self._open) if tag == "svg"), {})
        # A text that is turned has its place in `transform`, and is as long as the picture is high.
        if "viewbox" not in picture or "transform" in own:
            return
        left, top, width, height = map(float, picture["viewbox"].split())
        size = float(own.get("font-size", picture.get("font-size", 16)))
        # The font that matplotlib brings is wider than those of browsers.
        length = TextPath((0, 0), words, size=size, prop=FontProperties("sans")).get_extents().width
        x = float(own.get("x", 0))
        anchor = {"middle": length / 2, "end": length}.get(own.get("text-anchor", ""), 0)
        first, last, y = x - anchor, x - anchor + length, float(own.get("y", 0))
        if not (left <= first and last <= left + width and top + size / 2 <= y <= top + height):
            self.found.append(
                f"{words!r} ends at {last:.0f} of {left + width:.0f}, outside its picture: "
                f"{re.sub(r' +', ' ', picture.get('aria-label') or '')[:60]!r}"
            )
