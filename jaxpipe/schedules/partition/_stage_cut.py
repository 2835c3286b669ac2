"""Cutting each stage into prologue, trunk and epilogue.

The trunk is the run of layers that all stages have in common; it runs as one straight program on
all of them. The prologue is the layers before it, which only some stages have. The epilogue is the
layers after it on the last stage, up to the loss.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageCut:
    """The layers of one stage, as index ranges.

    Attributes:
        prologue: Layers before the trunk.
        trunk: Layers that are equivalent on every stage, and equally many.
        epilogue: Layers after the trunk; empty on all stages but the last.
    """

    prologue: range
    trunk: range
    epilogue: range


def cut_stages(signatures: Sequence[Hashable], boundaries: Sequence[int]) -> tuple[StageCut, ...]:
    """The trunk of each stage: the longest run that all but the last end with, and the last has."""
    num_stages = len(boundaries) - 1
    if num_stages == 1:
        # A fused value and gradient keeps nothing between forward and backward.
        return (StageCut(range(0), range(0), range(boundaries[1])),)
    stages = [list(signatures[boundaries[s] : boundaries[s + 1]]) for s in range(num_stages)]
    size = _common_suffix(stages[:-1])
    offset = None
    while size and (offset := _find_last(stages[-1], stages[0][-size:])) is None:
        size -= 1
    cuts = [
        StageCut(
            range(boundaries[s], boundaries[s + 1] - size),
            range(boundaries[s + 1] - size, boundaries[s + 1]),
            range(0),
        )
        for s in range(num_stages - 1)
    ]
    first = boundaries[-2]
    last = boundaries[-1]
    # Without a common run, only the last layer runs with the loss.
    start = last - 1 if offset is None else first + offset
    cuts.append(
        StageCut(range(first, start), range(start, start + size), range(start + size, last))
    )
    return tuple(cuts)


def _common_suffix(stages: Sequence[Sequence[Hashable]]) -> int:
    size = min(len(stage) for stage in stages)
    while size and any(stage[len(stage) - size :] != stages[0][-size:] for stage in stages):
        size -= 1
    return size


def _find_last(stage: Sequence[Hashable], run: Sequence[Hashable]) -> int | None:
    starts = [
        i for i in range(len(stage) - len(run) + 1) if list(stage[i : i + len(run)]) == list(run)
    ]
    return starts[-1] if starts else None
