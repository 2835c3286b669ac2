"""Buffer slots by lifetime."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Slots:
    """Slots of the values of one buffer of one stage."""

    # The slot of each unit, or -1 if it never enters. Idle actions have index -1, for which there
    # is a further -1 at the end.
    slot_of: tuple[int, ...]
    depth: int
    # For each tick the lowest slot that no value uses in that tick, at most `depth`.
    vacant: tuple[int, ...]

    def row(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the slot of each unit of a row over ticks; -1 stays -1."""
        slot_of = self.slot_of
        return tuple([slot_of[unit] for unit in units])


def assign_slots(
    num_units: int,
    starts: Sequence[int],
    ends: Sequence[Sequence[int]],
    *,
    frees_first: bool = False,
) -> Slots:
    """Assign each value the lowest slot that is free during its lifetime.

    `starts` contains for each tick the unit whose value starts to live, the rows of `ends` those
    whose values are used for the last time; -1 means no unit. With `frees_first`, a slot that is
    freed in a tick can be reused in that tick (the exchange sends before the stage computes).
    """
    slot_of = [-1] * (num_units + 1)
    free: list[int] = []
    depth = 0
    vacant: list[int] = []
    # In the order in which values start to live, the depth is the maximum number of values alive at
    # the same time.
    for tick, start in enumerate(starts):
        ending = [row[tick] for row in ends]
        if frees_first:
            for unit in ending:
                if unit >= 0:
                    heappush(free, slot_of[unit])
        if start >= 0:
            if free:
                slot_of[start] = heappop(free)
            else:
                slot_of[start] = depth
                depth += 1
        # The lowest free slot, which the next value would get. `depth` is the spill slot.
        vacant.append(free[0] if free else depth)
        if not frees_first:
            for unit in ending:
                if unit >= 0:
                    heappush(free, slot_of[unit])
    return Slots(tuple(slot_of), depth, tuple(vacant))
