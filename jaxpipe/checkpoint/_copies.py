"""Comparing the copies of a state that replicas hold, before one of them becomes a checkpoint."""

import math
from collections.abc import Mapping, Sequence

from jaxpipe.distributed import listed
from jaxpipe.errors import CheckpointError
from jaxpipe.state import Leaf

_SHOWN = 4

Hashes = Mapping[str, Mapping[str, Sequence[str]]]
"""Hashes of the copies of each block that a process holds, by array name and block number."""


def merge_hashes(
    reports: Sequence[Hashes], grids: Mapping[str, tuple[int, ...]], leaves: Mapping[str, Leaf]
) -> dict[str, dict[int, str]]:
    """The one hash of each block, by array name and block number, from all processes' reports.

    `grids` says into how many blocks each array is cut along each dim. Raises CheckpointError where
    replicas differ: Orbax divides the writing over them, so that the files would hold a mixture.
    """
    holders: dict[tuple[str, int], dict[str, list[int]]] = {}
    for process, report in enumerate(reports):
        for name, blocks in report.items():
            for number, hashes in blocks.items():
                for sha256 in hashes:
                    holders.setdefault((name, int(number)), {}).setdefault(sha256, []).append(
                        process
                    )
    differing: dict[str, str] = {}
    for (name, number), having in holders.items():
        if len(having) > 1:
            row = number // math.prod(grids[name][1:])
            # On two devices of one process too.
            shares = " and in ".join(listed(processes) for processes in having.values())
            differing |= dict.fromkeys(_leaves_in(leaves, name, row), shares)
    if differing:
        lines = [f"{leaf} (in {shares})" for leaf, shares in differing.items()]
        more = f" and {len(lines) - _SHOWN} more leaves" if len(lines) > _SHOWN else ""
        raise CheckpointError(
            "all replicas must hold the same values, but got different ones of "
            f"{', '.join(lines[:_SHOWN])}{more}. Nothing was saved, and earlier checkpoints are as "
            "they were: load one, which makes replicas equal again. Give all processes the same "
            "parameters; if they had them, look for a device that computes wrongly."
        )
    merged: dict[str, dict[int, str]] = {}
    for (name, number), having in holders.items():
        merged.setdefault(name, {})[number] = next(iter(having))
    return merged


def _leaves_in(leaves: Mapping[str, Leaf], array: str, row: int) -> list[str]:
    """Keys of the leaves of which a row holds something.

    The array's name where it is none of the catalog's.
    """
    found = [
        key
        for key, leaf in leaves.items()
        if any(span.array == array and row in span.rows for copy in leaf.copies for span in copy)
    ]
    return found or [array]
