"""Layer lists and partitions as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jaxpipe._util.text import format_bytes, format_table
from jaxpipe.errors import counted

from ._costs import Profile

_LISTED = 60  # longer lists leave out the middle
_NAME_RUNS = 4


@dataclass(frozen=True)
class Tie:
    """Parameters that several layers share.

    Attributes:
        key: The key that ties the layers.
        layers: Indices of the layers that hold them, at least two.
        num_params: Number of parameters, each counted once.
    """

    key: str
    layers: tuple[int, ...]
    num_params: int

    def repeated(self, first: int, end: int) -> int:
        """Number of parameters that the layers `[first, end)` count more than once."""
        holders = sum(first <= layer < end for layer in self.layers)
        return max(holders - 1, 0) * self.num_params


def format_layers(names: Sequence[str], num_params: Sequence[int] | None) -> str:
    """The numbered layer list of error messages, each line after a newline and indented."""
    lines = [
        f"\n  {index}: {name}"
        + ("" if num_params is None else f" ({counted(num_params[index], 'parameter')})")
        for index, name in enumerate(names)
    ]
    if len(lines) > _LISTED:
        half = _LISTED // 2
        lines[half:-half] = [f"\n  ... {len(lines) - 2 * half} more layers ..."]
    return "".join(lines)


def format_partition(
    boundaries: Sequence[int],
    names: Sequence[str],
    num_params: Sequence[int] | None = None,
    *,
    stages: Sequence[int] | None = None,
    profile: Profile | None = None,
    ties: Sequence[Tie] = (),
) -> str:
    """A partition as a table, one line per stage: layers, parameters, times and memory.

    None of `num_params` or `profile` leaves out their columns. `stages` has the stage of each part
    if stages hold several; parameters of `ties` count once in each part.

    Example:
        >>> names = ["Embed", "Block", "Block", "Head"]
        >>> print(format_partition([0, 2, 4], names, [50, 200, 200, 0]))
        stage  layers  names         parameters  of largest
            0  [0, 2)  Embed, Block         250       100 %
            1  [2, 4)  Block, Head          200        80 %
        total       4                       450
    """
    cuts = list(zip(boundaries[:-1], boundaries[1:], strict=True))
    columns = [["stage", *map(str, range(len(cuts)) if stages is None else stages), "total"]]
    if stages is not None:
        columns[0][-1] = ""
        columns.insert(0, ["part", *map(str, range(len(cuts))), "total"])
    columns.append(["layers", *(f"[{a}, {b})" for a, b in cuts), str(len(names))])
    names_column = len(columns)
    columns.append(["names", *(_short_names(names[a:b]) for a, b in cuts), ""])
    if num_params is not None:
        spans = [*cuts, (0, len(names))]
        sums = [sum(num_params[a:b]) - sum(tie.repeated(a, b) for tie in ties) for a, b in spans]
        stars = [
            "*" if any(a <= i < b for tie in ties for i in tie.layers) else " " * bool(ties)
            for a, b in cuts
        ]
        counts = [
            f"{value:,}{star}" for value, star in zip(sums, [*stars, " " * bool(ties)], strict=True)
        ]
        columns += [["parameters", *counts], ["of largest", *_shares(sums[:-1]), ""]]
    if profile is not None:
        columns += _cost_columns(profile, boundaries, cuts)
    sides = "".join("<" if index == names_column else ">" for index in range(len(columns)))
    lines = format_table(list(zip(*columns, strict=True)), sides)
    lines += [
        f"* tied {tie.key!r}: layers {', '.join(names[i] for i in tie.layers)} share "
        f"{counted(tie.num_params, 'parameter')}, which count once in the total"
        for tie in ties
        if num_params is not None
    ]
    if profile is not None:
        lines.append(f"times: {profile.source}")
        if profile.stage_sharded_params:
            lines.append(
                f"every stage also holds {counted(profile.stage_sharded_params, 'parameter')} of "
                "split layers"
            )
    return "\n".join(lines)


def _cost_columns(
    profile: Profile, boundaries: Sequence[int], cuts: Sequence[tuple[int, int]]
) -> list[list[str]]:
    times = profile.times()
    forward, backward = (
        [sum(each[which] for each in times[a:b]) for a, b in cuts] for which in (0, 1)
    )
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    columns = [
        ["forward ms", *(f"{1e3 * value:,.3f}" for value in (*forward, sum(forward)))],
        ["backward ms", *(f"{1e3 * value:,.3f}" for value in (*backward, sum(backward)))],
        ["of slowest", *_shares(both), ""],
    ]
    if profile.memory is not None:
        columns.append(["memory", *map(format_bytes, profile.part_bytes(boundaries)), ""])
        columns.append(["in flight", *map(str, profile.memory.in_flight), ""])
    return columns


def _shares(values: Sequence[float]) -> list[str]:
    largest = max(values)
    return [f"{100 * value / largest:.0f} %" if largest else "-" for value in values]


def _short_names(names: Sequence[str]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    parts = [name if count == 1 else f"{name} x {count}" for name, count in runs]
    if len(parts) > _NAME_RUNS:
        parts = [parts[0], parts[1], "...", parts[-1]]
    return ", ".join(parts)
