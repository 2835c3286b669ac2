"""Grouping ticks of equal content into runs."""

from collections.abc import Sequence
from itertools import groupby

from ._program import Sends, Table, Tables, TickRun

MAX_RUNS = 8
"""The most runs a program has; each is compiled by itself."""

SHORT_RUN = 4
"""Neighbouring runs shorter than this are joined when there are too many."""

_Piece = tuple[int, int, tuple[bool, bool, bool]]


def tick_runs(num_ticks: int, tables: Tables[Table]) -> tuple[TickRun, ...]:
    """Group the ticks of a program.

    Ticks belong together as long as the same kinds of computing (forward, backward, weight) occur in them, on any
    stage. What travels is counted afterwards. With one chunk a stage, stretches of at least `SHORT_RUN` ticks in which
    every stage runs all kinds are kept apart: the steady part of a schedule then has no idle action and no branch.
    A schedule whose content alternates would give runs without number: beyond `MAX_RUNS`, neighbours shorter than
    `SHORT_RUN` ticks are joined, and if that is not enough all but the first three and the last three.

    Args:
        num_ticks: Length of the program.
        tables: Its tables.

    Returns:
        The runs, from tick 0 to `num_ticks` without gaps.
    """
    kinds = (tables.forward, tables.backward, tables.weight)
    # By kind and tick the microbatches of all stages: one device program runs on all, so content is that of any stage.
    columns = [list(zip(*actions.microbatch, strict=True)) for actions in kinds]
    content = list(zip(*([max(column) >= 0 for column in kind] for kind in columns), strict=True))
    is_steady = _steady([kind for kind in columns if max(map(max, kind)) >= 0], tables.forward.chunk)
    pieces: list[_Piece] = []
    for (has, _), ticks in groupby(range(num_ticks), key=lambda tick: (content[tick], is_steady[tick])):
        listed = list(ticks)
        pieces.append((listed[0], listed[-1] + 1, has))
    if len(pieces) > MAX_RUNS:
        pieces = _joined_short(pieces)
    # Content changes most where the pipeline fills and drains, at both ends: these stay apart.
    if len(pieces) > MAX_RUNS:
        pieces = [*pieces[:3], _joined(pieces[3:-3]), *pieces[-3:]]
    return tuple(
        TickRun(
            start,
            stop,
            *has,
            activation_sends=_sends(tables.activations.send_to, start, stop),
            # A result that never waits is sent in the exchange of the tick after: these are the run's ticks, one later.
            next_activation_sends=_sends(tables.activations.send_to, start + 1, stop + 1),
            gradient_sends=_sends(tables.gradients.send_to, start, stop),
        )
        for start, stop, has in pieces
    )


def _steady(kinds: Sequence[Sequence[Sequence[int]]], forward_chunk: Table) -> list[bool]:
    """For each tick whether it lies in a long stretch in which every stage runs all kinds of actions that occur."""
    # With several chunks an action is branched on its chunk anyway, so that a run without idle actions saves no branch.
    has_chunks = any(chunk > 0 for row in forward_chunk for chunk in row)
    marks = [len(kinds) > 1 and not has_chunks and min(map(min, column)) >= 0 for column in zip(*kinds, strict=True)]
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


def _sends(send_to: Table, start: int, stop: int) -> Sends:
    """Who sends to whom in the exchanges of some ticks; those behind the program's end count for nothing."""
    found: dict[int, set[tuple[int, int]]] = {}
    for source, row in enumerate(send_to):
        for target in row[start:stop]:
            if target >= 0:
                found.setdefault((target - source) % len(send_to), set()).add((source, target))
    return {hop: tuple(sorted(pairs)) for hop, pairs in sorted(found.items())}
