"""Pictures of the documentation, drawn from schedules when it is built.

They are SVG that a page includes inline, so that text and lines have the colours of the page,
light or dark. On a phone 360 pixels wide, letters are 11 pixels high.
"""

import html
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from jaxpipe.schedules import draw

_WIDTH, _LEFT, _ROW = 360, 46, 22
_COLOURS = {"forward": "#5b8ff9", "backward": "#3fb68b"}
_DIGITS = "#0d1117"
_LINES = {"gpipe": "#c0504d", "1f1b": "#5b8ff9", "1f1b-v": "#3fb68b"}


def write_pictures(folder: Path) -> None:
    """Write `step.svg` and `memory.svg`.

    Args:
        folder: Where to.
    """
    folder.mkdir(exist_ok=True)
    (folder / "step.svg").write_text(_step(num_microbatches=8, num_stages=3), encoding="utf-8")
    (folder / "memory.svg").write_text(_memory(num_microbatches=16, num_stages=4), encoding="utf-8")


def step_alone() -> str:
    """The picture of a step as a file of its own, `_static/step.svg`, for the README.

    Its lines follow the reader's choice of light or dark.
    """
    style = (
        "<style>svg{color:#1f2328} @media (prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
    )
    picture = _step(num_microbatches=8, num_stages=3)
    return picture.replace(">\n", f">\n{style}\n", 1)


def _step(num_microbatches: int, num_stages: int) -> str:
    """A step of 1F1B, with the names of its parts."""
    slices = draw("1f1b", num_microbatches, num_stages).slices
    end_s = max(one.end_s for one in slices)
    update = 26
    scale = (_WIDTH - _LEFT - update - 4) / end_s
    top, bottom = 22, 22 + num_stages * _ROW

    def x(time_s: float) -> float:
        return _LEFT + time_s * scale

    parts = [_text(0, top + stage * _ROW + 15, f"stage {stage}") for stage in range(num_stages)]
    parts.append(
        _box(_LEFT, top, end_s * scale, num_stages * _ROW - 2, "currentColor", opacity=0.08)
    )
    for one in slices:
        y = top + one.stage * _ROW
        parts.append(
            _box(x(one.start_s), y, x(one.end_s) - x(one.start_s) - 1, _ROW - 2, _COLOURS[one.kind])
        )
        parts.append(
            _text(
                (x(one.start_s) + x(one.end_s)) / 2,
                y + 14,
                str(one.microbatch),
                middle=True,
                fill=_DIGITS,
            )
        )
    full_s = max(
        min(one.start_s for one in slices if one.stage == stage) for stage in range(num_stages)
    )
    empty_s = min(
        max(one.end_s for one in slices if one.stage == stage) for stage in range(num_stages)
    )
    for begin, stop, name in (
        (0.0, full_s, "fill"),
        (full_s, empty_s, "steady"),
        (empty_s, end_s, "drain"),
    ):
        parts.append(_line([(x(begin) + 1, 16), (x(stop) - 1, 16)], "currentColor"))
        parts.append(_text((x(begin) + x(stop)) / 2, 11, name, middle=True))
    parts.append(_box(_WIDTH - update, top, update, num_stages * _ROW - 2, "#8e7cc3"))
    middle = _WIDTH - update / 2
    parts.append(
        f'<text transform="translate({middle + 4:g} {(top + bottom) / 2:g}) rotate(-90)" '
        'text-anchor="middle" fill="#fff">update</text>'
    )
    entries = (("forward", _COLOURS["forward"]), ("backward", _COLOURS["backward"]))
    parts += _legend([*entries, ("sum over replicas, optimiser", "#8e7cc3")], bottom + 8)
    return _svg(
        f"One training step of {num_microbatches} microbatches on {num_stages} stages with the "
        "1F1B schedule. The stages fill one after another. In the steady phase each one runs a "
        "forward and a backward pass in turn. Then they drain, the gradients are "
        "summed over the replicas, and the optimiser updates the parameters.",
        bottom + 24,
        parts,
    )


def _memory(num_microbatches: int, num_stages: int) -> str:
    """Microbatches in flight on the first stage over a step, for three schedules."""
    found = {name: _in_flight(name, num_microbatches, num_stages) for name in _LINES}
    end_s = max(times[-1] for times, _ in found.values())
    top, bottom, most = 8, 138, num_microbatches
    scale_x, scale_y = (_WIDTH - 24 - 4) / end_s, (bottom - top) / most
    parts: list[str] = []
    for count in range(0, most + 1, 4):
        y = bottom - count * scale_y
        parts.append(_line([(24, y), (_WIDTH - 4, y)], "currentColor", opacity=0.2))
        parts.append(_text(18, y + 4, str(count), end=True))
    for name, (times, counts) in found.items():
        points: list[tuple[float, float]] = []
        before = 0.0
        for time_s, count in zip(times, counts, strict=True):
            points += [(24 + time_s * scale_x, bottom - each * scale_y) for each in (before, count)]
            before = count
        parts.append(_line(points, _LINES[name], width=2))
    parts.append(_text(_WIDTH - 4, bottom + 14, "time", end=True))
    parts += _legend(list(_LINES.items()), bottom + 20)
    return _svg(
        f"Residuals in memory on the first of {num_stages} stages during a step of "
        f"{num_microbatches} microbatches, in units of one microbatch on a whole stage. With gpipe "
        f"they grow to {num_microbatches}. With 1f1b they stay at {max(found['1f1b'][1]):g} and "
        f"with 1f1b-v at {max(found['1f1b-v'][1]):g}, however many microbatches follow.",
        bottom + 36,
        parts,
    )


def _in_flight(
    name: str, num_microbatches: int, num_stages: int
) -> tuple[list[float], list[float]]:
    """Times, and what is in flight on the first stage after each, in whole stages."""
    picture = draw(name, num_microbatches, num_stages)
    size = 1 / picture.num_chunks
    first = [one for one in picture.slices if one.stage == 0]
    changes = sorted(
        (one.start_s, size) if one.kind == "forward" else (one.end_s, -size) for one in first
    )
    return [time_s for time_s, _ in changes], list(accumulate(change for _, change in changes))


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    text = html.escape(title)
    return (
        f'<svg class="drawn" role="img" aria-label="{text}" viewBox="0 0 {_WIDTH} {height:g}" '
        'xmlns="http://www.w3.org/2000/svg" font-size="11" font-family="sans-serif">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    middle: bool = False,
    end: bool = False,
    fill: str = "currentColor",
) -> str:
    anchor = ' text-anchor="middle"' if middle else ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{anchor}>{html.escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" '
        f'fill-opacity="{opacity:g}"/>'
    )


def _line(
    points: Sequence[tuple[float, float]], stroke: str, width: float = 1.0, opacity: float = 1.0
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}"/>'
    )


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    parts, x = list[str](), 4.0
    for name, colour in entries:
        parts += [_box(x, y, 10, 10, colour), _text(x + 14, y + 9, name)]
        x += 26 + 6.2 * len(name)
    return parts
