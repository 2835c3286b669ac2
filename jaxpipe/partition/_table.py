"""Layer lists and partitions as text."""

from collections.abc import Sequence
from itertools import groupby

_LISTED = 60  # longer lists leave out the middle
_NAME_RUNS = 4


def format_layers(names: Sequence[str], num_params: Sequence[int] | None) -> str:
    """The numbered layer list that error messages show.

    Args:
        names: One name per layer.
        num_params: Parameters per layer, or None where they are not known.

    Returns:
        One line per layer, each after a newline and indented; the middle of a list of more than 60 layers is left out.
    """
    lines = [
        f"\n  {index}: {name}" + ("" if num_params is None else f" ({_plural(num_params[index], 'parameter')})")
        for index, name in enumerate(names)
    ]
    if len(lines) > _LISTED:
        half = _LISTED // 2
        lines[half:-half] = [f"\n  ... {len(lines) - 2 * half} more layers ..."]
    return "".join(lines)


def format_partition(boundaries: Sequence[int], names: Sequence[str], num_params: Sequence[int] | None = None) -> str:
    """A partition as a table, one line per stage, to show before training starts.

    Args:
        boundaries: `num_stages + 1` layer indices, first 0, last `len(names)`.
        names: One name per layer.
        num_params: Parameters per layer; None leaves out the two columns that need them.

    Returns:
        Lines of equal width: stage, layers `[first, end)`, their names (equal neighbours counted), the stage's
        parameters, and these as a share of the largest stage's; then a line of totals. No newline at the end.

    Example:
        >>> print(format_partition([0, 2, 4], ["Embed", "Block", "Block", "Head"], [50, 200, 200, 0]))
        stage  layers  names         parameters  of largest
            0  [0, 2)  Embed, Block         250       100 %
            1  [2, 4)  Block, Head          200        80 %
        total       4                       450
    """
    cuts = list(zip(boundaries[:-1], boundaries[1:], strict=True))
    rows = [["stage", "layers", "names"]]
    rows += [[str(stage), f"[{a}, {b})", _short_names(names[a:b])] for stage, (a, b) in enumerate(cuts)]
    rows += [["total", str(len(names)), ""]]
    if num_params is not None:
        sums = [sum(num_params[a:b]) for a, b in cuts]
        largest = max(sums)
        shares = [f"{100 * value / largest:.0f} %" if largest else "-" for value in sums]
        columns = [("parameters", "of largest"), *((f"{v:,}", s) for v, s in zip(sums, shares, strict=True))]
        columns.append((f"{sum(sums):,}", ""))
        rows = [[*row, *columns[index]] for index, row in enumerate(rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    names_column = 2
    lines = (
        "  ".join(
            cell.ljust(width) if column == names_column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _short_names(names: Sequence[str]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    parts = [name if count == 1 else f"{name} x {count}" for name, count in runs]
    if len(parts) > _NAME_RUNS:
        parts = [parts[0], parts[1], "...", parts[-1]]
    return ", ".join(parts)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
