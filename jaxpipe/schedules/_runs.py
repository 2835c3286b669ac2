"""Grouping ticks of equal content into runs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from ._program import Table, TickRun

MAX_RUNS = 8
"""The most runs a program has; each is compiled by itself."""

SHORT_RUN = 4
"""Neighbouring runs shorter than this are joined when there are too many."""

_Piece = tuple[int, int, tuple[bool, bool, bool]]


def tick_runs(
    num_ticks: int, tables: Mapping[str, Table], hops: Mapping[str, Sequence[set[int]]], *, one_run: bool = False
) -> tuple[TickRun, ...]:
    """Group the ticks of a program.

    Ticks belong together as long as the same kinds of computing (forward, backward, weight) occur in them, on any
    stage. What travels is counted afterwards. With one chunk a stage, stretches of at least `SHORT_RUN` ticks in which
    every stage runs all kinds are kept apart: the steady part of a schedule then has no idle cell and needs no branch.
    A schedule whose content alternates would give runs without number: beyond `MAX_RUNS`, neighbours shorter than
    `SHORT_RUN` ticks are joined, and if that is not enough all but the first three and the last three.

    Args:
        num_ticks: Length of the program.
        tables: The tables `forward_microbatch`, `backward_microbatch`, `weight_microbatch` and `forward_chunk`.
        hops: `act` and `grad`: for each tick the directions in which something travels.
        one_run: Whether to put all ticks into one run.

    Returns:
        The runs, from tick 0 to `num_ticks` without gaps.
    """
    columns = [
        list(zip(*tables[name], strict=True))
        for name in ("forward_microbatch", "backward_microbatch", "weight_microbatch")
    ]
    content = list(zip(*([max(column) >= 0 for column in kind] for kind in columns), strict=True))
    is_steady = _steady([kind for kind in columns if max(map(max, kind)) >= 0], tables)
    pieces: list[_Piece] = []
    for (has, _), ticks in groupby(range(num_ticks), key=lambda tick: (content[tick], is_steady[tick])):
        listed = list(ticks)
        pieces.append((listed[0], listed[-1] + 1, has))
    if one_run:
        pieces = [_joined(pieces)]
    if len(pieces) > MAX_RUNS:
        pieces = _joined_short(pieces)
    if len(pieces) > MAX_RUNS:
        pieces = [*pieces[:3], _joined(pieces[3:-3]), *pieces[-3:]]
    return tuple(
        TickRun(start, stop, *has, _directions(hops["act"][start:stop]), _directions(hops["grad"][start:stop]))
        for start, stop, has in pieces
    )


def _steady(kinds: Sequence[Sequence[Sequence[int]]], tables: Mapping[str, Table]) -> list[bool]:
    """For each tick whether it lies in a long stretch in which every stage runs all kinds of cells that occur."""
    has_chunks = any(chunk > 0 for row in tables["forward_chunk"] for chunk in row)
    marks = [len(kinds) > 1 and not has_chunks and min(map(min, cells)) >= 0 for cells in zip(*kinds, strict=True)]
    steady: list[bool] = []
    for mark, group in groupby(marks):
        length = len(list(group))
        steady += [mark and length >= SHORT_RUN] * length
    return steady


def _joined_short(pieces: list[_Piece]) -> list[_Piece]:
    joined: list[_Piece] = []
    for is_short, group in groupby(pieces, key=lambda piece: piece[1] - piece[0] < SHORT_RUN):
        members = list(group)
        joined += [_joined(members)] if is_short else members
    return joined


def _joined(pieces: list[_Piece]) -> _Piece:
    forward, backward, weight = (any(column) for column in zip(*(has for *_, has in pieces), strict=True))
    return pieces[0][0], pieces[-1][1], (forward, backward, weight)


def _directions(ticks: Iterable[set[int]]) -> tuple[int, ...]:
    return tuple(sorted(set[int]().union(*ticks), reverse=True))
