"""How values travel from stage to stage in a tick program."""

from collections.abc import Mapping, Sequence

import jax

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Table, TickProgram

from ._buffers import select

Pairs = Mapping[int, Sequence[tuple[int, int]]]
"""Sources and targets, by how many stages further on the ring the target lies."""


def travelling(program: TickProgram, kind: str, ticks: range) -> Pairs:
    """Who sends to whom.

    Args:
        program: The program.
        kind: `act` or `grad`.
        ticks: Ticks in whose exchange something is sent; those behind the program's end count for nothing.

    Returns:
        The pairs, by hop.
    """
    found: dict[int, set[tuple[int, int]]] = {}
    for source, row in enumerate(program.tables[f"{kind}_send_to"]):
        for target in row[ticks.start : ticks.stop]:
            if target >= 0:
                found.setdefault((target - source) % program.num_stages, set()).add((source, target))
    return {hop: sorted(pairs) for hop, pairs in sorted(found.items())}


def exchange(value: PyTree, pairs: Pairs, stage: jax.Array, source: jax.Array, num_stages: int) -> PyTree:
    """Send a value on; what arrives where nobody sends is not to be read.

    Args:
        value: What this stage sends.
        pairs: Who sends to whom.
        stage: This device's stage.
        source: The stage that it receives from.
        num_stages: Length of the `stage` axis.

    Returns:
        What arrived.
    """
    arrived = None
    for hop, along in pairs.items():
        other = jax.tree.map(lambda x, along=along: jax.lax.ppermute(x, "stage", along), value)
        arrived = other if arrived is None else select((source + hop) % num_stages == stage, other, arrived)
    return value if arrived is None else arrived


def is_prompt(program: TickProgram, kind: str) -> bool:
    """Whether all that is sent was computed in the tick before, so that nothing waits to be sent.

    Args:
        program: The program.
        kind: `act` or `grad`.
    """
    computed = program.tables["forward_write" if kind == "act" else "backward_write"]
    sent = program.tables[f"{kind}_send"]
    rows = zip(computed, sent, strict=True)
    return any(slot >= 0 for row in sent for slot in row) and all(
        [slot >= 0 for slot in (-1, *made[:-1])] == [slot >= 0 for slot in row] and (not made or made[-1] < 0)
        for made, row in rows
    )


def following(table: Table) -> Table:
    """What a table says of the next tick."""
    return tuple((*row[1:], -1) for row in table)
