"""Pictures of the benchmarks' tables.

One horizontal bar a row, with its spread, one panel for each setting.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, str]


@dataclass(frozen=True)
class Picture:
    """How a table becomes a picture.

    Attributes:
        benchmark: The benchmark whose tables are meant: those that have all the columns.
        value: The column whose numbers are drawn.
        label: Columns that name a bar.
        panel: Columns whose values make a panel.
        title: What the picture shows.
        target: Where a line is drawn; None: nowhere.
        mark: A column whose number is marked at each bar; "" marks none.
        spread: The column of the value's smallest and largest, where a table has it.
    """

    benchmark: str
    value: str
    label: tuple[str, ...]
    panel: tuple[str, ...]
    title: str
    target: float | None = None
    mark: str = ""
    spread: str = "spread"

    @property
    def columns(self) -> set[str]:
        """What a table must have."""
        return {self.value, *self.label, *self.panel}


PICTURES = (
    Picture(
        "bubble",
        "ratio",
        ("schedule", "chunks"),
        ("S", "M", "F:I:W"),
        "Measured step over the formula",
        1.05,
    ),
    Picture(
        "peers",
        "of ideal",
        ("step",),
        ("size", "M"),
        "Fraction of ideal on two processors",
        mark="bound",
    ),
    Picture("work", "ratio", ("step",), (), "Processor time over a plain step's", 1.10),
    Picture(
        "memory",
        "MiB at M=8S",
        ("schedule", "recompute"),
        ("S",),
        "Temporary memory of a step, MiB",
    ),
    Picture(
        "compile",
        "total s",
        ("schedule", "trunk", "S", "blocks/S", "M"),
        (),
        "Seconds to build and compile",
        spread="",
    ),
    Picture(
        "gpu", "step ms", ("schedule", "chunks", "idle actions"), (), "Projected step, milliseconds"
    ),
)


def draw(results: dict[str, list[list[Row]]], directory: Path) -> list[str]:
    """Draw all pictures that there are results for.

    Args:
        results: Tables by the benchmark's name.
        directory: Where the pictures go, as `<benchmark>.png`.

    Returns:
        What was written or left out, and why; one line each.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return ["pictures left out: matplotlib must be installed to draw them."]
    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    said = []
    for picture in PICTURES:
        if picture.benchmark not in results:
            continue
        tables = [
            table
            for table in results[picture.benchmark]
            if table and picture.columns <= set(table[0])
        ]
        rows = [row for table in tables for row in table if _number(row[picture.value]) is not None]
        if not rows:
            said.append(
                f"{picture.benchmark}: no table with the columns "
                f"{', '.join(sorted(picture.columns))}"
            )
            continue
        path = directory / f"{picture.benchmark}.png"
        _draw(picture, rows, path)
        said.append(str(path))
    return said


def _draw(picture: Picture, rows: list[Row], path: Path) -> None:
    from matplotlib import pyplot

    panels = [
        (key, list(group))
        for key, group in groupby(rows, lambda row: [row[name] for name in picture.panel])
    ]
    heights = [len(group) + 1 for _, group in panels]
    figure, grid = pyplot.subplots(
        len(panels),
        1,
        squeeze=False,
        sharex=True,
        figsize=(8, 1 + 0.28 * sum(heights)),
        height_ratios=heights,
    )
    for axes, (key, group) in zip(grid[:, 0], panels, strict=True):
        _draw_panel(picture, axes, group)
        axes.set_title(
            ", ".join(f"{n} = {v}" for n, v in zip(picture.panel, key, strict=True)), fontsize=9
        )
    figure.suptitle(picture.title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(picture: Picture, axes: Any, rows: list[Row]) -> None:
    values = [float(row[picture.value]) for row in rows]
    ends = [
        _spread(row.get(picture.spread, ""), value) for row, value in zip(rows, values, strict=True)
    ]
    errors = [
        [v - low for v, (low, _) in zip(values, ends, strict=True)],
        [h - v for v, (_, h) in zip(values, ends, strict=True)],
    ]
    labels = [" ".join(row[name] for name in picture.label) for row in rows]
    ours = [
        "tab:blue" if "jaxpipe" in label or picture.benchmark != "peers" else "tab:gray"
        for label in labels
    ]
    places = range(len(rows))
    axes.barh(places, values, xerr=errors, color=ours, height=0.7, error_kw={"lw": 1})
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    if picture.target is not None:
        axes.axvline(picture.target, color="tab:red", lw=1)
    for place, row in zip(places, rows, strict=True):
        mark = _number(row.get(picture.mark, ""))
        if mark is not None:
            axes.plot([mark, mark], [place - 0.4, place + 0.4], color="tab:red", lw=1.5)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _spread(text: str, value: float) -> tuple[float, float]:
    """The smallest and largest, no further in than the value itself."""
    low, _, high = text.partition(" to ")
    ends = _number(low), _number(high)
    return min(value if ends[0] is None else ends[0], value), max(
        value if ends[1] is None else ends[1], value
    )
