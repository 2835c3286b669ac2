"""Formatting of sizes and tables."""

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.45 system-ui, sans-serif; color: CanvasText; background: Canvas; }
body { margin: 1.5em auto; max-width: 1240px; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .2em .4em; vertical-align: top; }
th { border-bottom: 1px solid #999; } tr:nth-child(even) td { background: #8882; }
.advice { background: #f6bd1633; padding: .6em 1em; }
"""
# A picture may be shown without a page that could give it colours, such as in a notebook or on a
# web site. It therefore has its own background, and follows the reader's system.
_PICTURE_STYLE = """<style>
@media (prefers-color-scheme: dark) {
  .jaxpipe-paper { fill: #1c1e22 } .jaxpipe-ink { fill: #dddddd } .jaxpipe-lane { fill: #33363c }
}
</style>"""
_ALIGN = {"<": "left", ">": "right"}

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(num_bytes: int) -> str:
    """Format a size in the largest unit in which it is at least 1.

    Example:
        >>> format_bytes(512), format_bytes(1536)
        ('512 B', '1.5 KiB')
    """
    power = min(max(num_bytes, 1).bit_length() - 1, 10 * (len(_UNITS) - 1)) // 10
    return f"{num_bytes / 1024**power:,.{1 if power else 0}f} {_UNITS[power]}"


def format_table(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Format a table, whose first row has the heads, as lines without trailing spaces.

    `sides` has `<` (left) or `>` (right) for each column, or one of them for all columns.

    Example:
        >>> format_table([("stage", "layers"), ("0", "Embed")], "><")
        ['stage  layers', '    0  Embed']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides * len(widths) if len(sides) == 1 else sides
    cells = [
        [f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def html_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], sides: str = "<", cell_style: str = ""
) -> str:
    """Format a table as HTML, with its own scroll bar if it is wider than the page.

    Texts are escaped. `sides` is as in `format_table`. `cell_style` is the CSS of each cell.
    """

    def line(kind: str, texts: Sequence[str]) -> str:
        columns = sides * len(texts) if len(sides) == 1 else sides
        cells = [
            f'<{kind} style="text-align: {_ALIGN[side]}; {cell_style}">{html.escape(text)}</{kind}>'
            for text, side in zip(texts, columns, strict=True)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    lines = [*([line("th", heads)] if heads else []), *(line("td", row) for row in rows)]
    table = f'<table style="margin: 0 0 0.5em 0">{"".join(lines)}</table>'
    return f'<div style="overflow-x: auto">{table}</div>'


def svg_start(width: float, height: float) -> list[str]:
    """Return the first lines of a picture with a background.

    A page narrower than the picture scales it down. Text has the class `jaxpipe-ink`, and empty
    lanes have `jaxpipe-lane`, so that they are readable in dark mode.
    """
    size = f"{width:g}", f"{height:g}"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" font-size="12" '
        'style="max-width: 100%; height: auto">',
        _PICTURE_STYLE,
        '<rect width="100%" height="100%" class="jaxpipe-paper" fill="#ffffff"/>',
    ]


def html_page(title: str, body: str) -> str:
    """Return a self-contained page."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_STYLE}</style></head><body>",
            body,
            "</body></html>",
            "",
        ]
    )
