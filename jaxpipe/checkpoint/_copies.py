"""Checks that all replicas hold the same state before a checkpoint is committed."""

import math
from collections.abc import Mapping, Sequence

from jaxpipe.core.state import Leaf
from jaxpipe.distributed import listed
from jaxpipe.errors import CheckpointError

_SHOWN = 4

Hashes = Mapping[str, Mapping[str, Sequence[str]]]
"""Hashes of the copies of each block that a process holds, by array name and block number."""


def merge_hashes(
    reports: Sequence[Hashes], grids: Mapping[str, tuple[int, ...]], leaves: Mapping[str, Leaf]
) -> dict[str, dict[int, str]]:
    """Merge all processes' reports into one hash per block; replicas that differ are an error."""
    holders: dict[tuple[str, int], dict[str, list[int]]] = {}
    for process, report in enumerate(reports):
        for name, blocks in report.items():
            for number, hashes in blocks.items():
                for sha256 in hashes:
                    holders.setdefault((name, int(number)), {}).setdefault(sha256, []).append(
                        process
                    )
    # Orbax divides the writing between replicas: the files would hold a mixture of their values.
    differing: dict[str, str] = {}
    for (name, number), having in holders.items():
        if len(having) > 1:
            # `grids` has the number of blocks along each dim.
            row = number // math.prod(grids[name][1:])
            # Two devices of one process can differ too.
            shares = " and in ".join(listed(processes) for processes in having.values())
            differing |= dict.fromkeys(_leaves_in(leaves, name, row), shares)
    if differing:
        lines = [f"{leaf} (in {shares})" for leaf, shares in differing.items()]
        more = f" and {len(lines) - _SHOWN} more leaves" if len(lines) > _SHOWN else ""
        raise CheckpointError(
            "all replicas must hold the same values, but got different ones of "
            f"{', '.join(lines[:_SHOWN])}{more}. Nothing was saved, and earlier checkpoints are "
            "unchanged: load one to make the replicas equal again. Give all processes the same "
            "parameters; if they had the same ones, look for a device that computes wrongly."
        )
    merged: dict[str, dict[int, str]] = {}
    for (name, number), having in holders.items():
        merged.setdefault(name, {})[number] = next(iter(having))
    return merged


def _leaves_in(leaves: Mapping[str, Leaf], array: str, row: int) -> list[str]:
    """Return the keys of the leaves with values in a row, or the array's name if there are none."""
    found = [
        key
        for key, leaf in leaves.items()
        if any(span.array == array and row in span.rows for copy in leaf.copies for span in copy)
    ]
    return found or [array]
