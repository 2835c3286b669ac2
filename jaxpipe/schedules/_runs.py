"""Grouping ticks of equal content into runs."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ._program import ActionMode, Actions, Idle, Row, Sends, Table, Tables, TickProgram, TickRun

MAX_RUNS = 8
"""The maximum number of runs of a program; each run is compiled separately."""

SHORT_RUN = 4
"""Neighbouring runs shorter than this are joined if there are too many runs."""

_Piece = tuple[int, int, tuple[bool, ...]]
"""First tick, the tick after the last, and which of `_kinds` occur."""


def tick_runs(num_ticks: int, tables: Tables[Table]) -> tuple[TickRun, ...]:
    """Group the ticks of a program into runs.

    Consecutive ticks form a run while the same kinds of action (forward, backward, weight) occur in
    them, on any stage. Exchanges do not affect the grouping. With one chunk per stage, stretches of
    at least `SHORT_RUN` ticks in which every stage runs all kinds are separate runs: the steady
    part of a schedule then has no idle action and no branch.
    """
    columns = _columns(tables)
    content = _content(columns)
    is_steady = _steady(
        [kind for kind in columns if max(map(max, kind)) >= 0], tables.forward.chunk
    )
    pieces: list[_Piece] = []
    for (has, _), ticks in groupby(
        range(num_ticks), key=lambda tick: (content[tick], is_steady[tick])
    ):
        listed = list(ticks)
        pieces.append((listed[0], listed[-1] + 1, has))
    # A schedule with alternating content would have very many runs.
    if len(pieces) > MAX_RUNS:
        pieces = _joined_short(pieces)
    # Content changes most at both ends, where the pipeline fills and drains, so the runs there stay
    # separate.
    if len(pieces) > MAX_RUNS:
        pieces = [*pieces[:3], _joined(pieces[3:-3]), *pieces[-3:]]
    return tuple(_run(piece, tables) for piece in pieces)


def with_ends_apart(program: TickProgram) -> TickProgram:
    """Make the first and the last tick separate runs. No run has a policy for idle actions then."""
    # A run of one tick is not a loop. Operations before the first tick and after the last, such as
    # the gathers of weights and the reductions of gradients, can then overlap its computation.
    last = program.num_ticks - 1
    content = _content(_columns(program.tables))
    inner = [(max(run.start, 1), min(run.stop, last), run) for run in program.runs]
    pieces = [
        (start, stop, (run.has_forward, run.has_backward, run.has_weight))
        for start, stop, run in inner
    ]
    runs = [_run(piece, program.tables) for piece in pieces if piece[0] < piece[1]]
    ends = [
        _run((tick, tick + 1, content[tick]), program.tables) for tick in dict.fromkeys((0, last))
    ]
    return replace(program, runs=(ends[0], *runs, *ends[1:]))


def _columns(tables: Tables[Table]) -> list[list[tuple[int, ...]]]:
    """Return the microbatches of all stages by kind and tick."""
    return [list(zip(*kind.microbatch, strict=True)) for kind in _kinds(tables)]


def _kinds(tables: Tables[Table]) -> tuple[Actions[Table], ...]:
    return tables.forward, tables.backward, tables.weight


def _content(columns: Sequence[Sequence[Sequence[int]]]) -> list[tuple[bool, ...]]:
    """Return for each tick which kinds occur."""
    # All stages run one device program, so a kind occurs if any stage runs it.
    return [tuple(max(stages) >= 0 for stages in tick) for tick in zip(*columns, strict=True)]


def _run(piece: _Piece, tables: Tables[Table]) -> TickRun:
    start, stop, (has_forward, has_backward, has_weight) = piece
    forward, backward, weight = ([row[start:stop] for row in kind.chunk] for kind in _kinds(tables))
    pending = [row[start:stop] for row in tables.pending_write]
    both = [
        pair for rows in zip(forward, backward, strict=True) for pair in zip(*rows, strict=True)
    ]
    return TickRun(
        start,
        stop,
        activation_sends=_sends(tables.activations.send_to, start, stop),
        # An unbuffered result is sent in the exchange of the next tick, so these are the run's
        # ticks shifted by one.
        next_activation_sends=_sends(tables.activations.send_to, start + 1, stop + 1),
        gradient_sends=_sends(tables.gradients.send_to, start, stop),
        has_one_chunk=all(one == other or min(one, other) < 0 for one, other in both),
        forward=_action(forward) if has_forward else None,
        backward=_action(backward, pending) if has_backward else None,
        weight=_action(weight) if has_weight else None,
    )


def _action(chunks: Sequence[Row], pending: Sequence[Row] = ()) -> ActionMode:
    """Return the mode of one kind of action from its chunks in some ticks."""
    found = {chunk for row in chunks for chunk in row}
    # Only split backwards write a slot for the operands of their weight gradient. Other kinds have
    # no such rows.
    at = (
        [each for rows in zip(chunks, pending, strict=True) for each in zip(*rows, strict=True)]
        if pending
        else []
    )
    splits = tuple(sorted({slot >= 0 for chunk, slot in at if chunk >= 0}))
    return ActionMode(
        Idle.BRANCH if -1 in found else Idle.NEVER, tuple(sorted(found - {-1})), splits
    )


def _steady(kinds: Sequence[Sequence[Sequence[int]]], forward_chunk: Table) -> list[bool]:
    """Return for each tick whether it is in a long stretch in which no stage is ever idle."""
    # With several chunks an action branches on its chunk anyway, so a run without idle actions
    # saves no branch.
    has_chunks = any(chunk > 0 for row in forward_chunk for chunk in row)
    marks = [
        len(kinds) > 1 and not has_chunks and min(map(min, column)) >= 0
        for column in zip(*kinds, strict=True)
    ]
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
    has = tuple(any(kind) for kind in zip(*(has for *_, has in pieces), strict=True))
    return pieces[0][0], pieces[-1][1], has


def _sends(send_to: Table, start: int, stop: int) -> Sends:
    """Return which stages send to which in the exchanges of some ticks of the program."""
    found: dict[int, set[tuple[int, int]]] = {}
    for source, row in enumerate(send_to):
        for target in row[start:stop]:
            if target >= 0:
                found.setdefault((target - source) % len(send_to), set()).add((source, target))
    return {hop: tuple(sorted(pairs)) for hop, pairs in sorted(found.items())}
