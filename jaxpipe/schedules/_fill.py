"""Insert the weight gradients of split backwards into a timetable.

They are inserted so that they cost as little time as possible in lockstep.
"""

from collections.abc import Sequence

IDLE = -1

Row = Sequence[bool]
"""For each step, whether a stage runs an action."""


def fill_weights(
    forwards: Sequence[Row], backwards: Sequence[Row], max_pending: int
) -> tuple[tuple[int, ...], ...]:
    """Choose the step in which each stage runs each weight gradient, first in, first out.

    A step takes as long as its busiest stage. A weight gradient is therefore free on a stage that
    runs less than others, and costs at most its own time if all stages run one together. Hence, for
    each step:

    - A stage that runs fewer actions than another one completes its oldest pending backward.
    - If all stages run the same number of actions, every stage gets a weight gradient as soon as
      each has one that it does not need for the free time of later steps.
    - Every stage also gets one if some stage would otherwise have more than `max_pending`.
    - The remaining weight gradients run in additional steps at the end.

    The result contains for each stage a row over the steps, including those added at the end: the
    step of the input gradient that is completed, or -1.
    """
    stages = range(len(forwards))
    num_steps = len(forwards[0])
    counts = [
        list(map(sum, zip(*rows, strict=True))) for rows in zip(forwards, backwards, strict=True)
    ]
    # In lockstep every stage waits for the one that runs the most, so a stage that runs less has
    # free time.
    has_room = [[count < max(each) for count in each] for each in zip(*counts, strict=True)]
    reserves = [_reserve([room[stage] for room in has_room], backwards[stage]) for stage in stages]
    pending: list[list[int]] = [[] for _ in stages]
    filled: list[list[int]] = [[] for _ in stages]
    for step in range(num_steps):
        # This comes first because a tick runs weight gradients last: a weight gradient may follow
        # its input gradient in the same step.
        for stage in stages:
            if backwards[stage][step]:
                pending[stage].append(step)
        gets = has_room[step]
        is_due = not any(gets) and all(
            len(pending[stage]) > reserves[stage][step] for stage in stages
        )
        # If a weight gradient must make the step longer, all stages run one.
        if is_due or _is_full(step, gets, pending, backwards, max_pending):
            gets = [True] * len(gets)
        _complete(gets, pending, filled)
    while any(pending):
        _complete([True] * len(pending), pending, filled)
    return tuple(map(tuple, filled))


def _reserve(has_room: Row, backwards: Row) -> list[int]:
    """Return for each step how many a stage must keep pending to fill its later free time."""
    reserve = 0
    reserves: list[int] = []
    for room, runs in zip(reversed(has_room), reversed(backwards), strict=True):
        reserves.append(reserve)
        reserve = max(0, reserve + room - runs)
    return reserves[::-1]


def _is_full(
    step: int, gets: list[bool], pending: list[list[int]], backwards: Sequence[Row], limit: int
) -> bool:
    """Return whether a stage has no room for the input gradient of the next step."""
    following = step + 1
    # A stage that gets a weight gradient in this step makes room by that.
    return any(
        not runs and len(waiting) >= limit and following < len(row) and row[following]
        for runs, waiting, row in zip(gets, pending, backwards, strict=True)
    )


def _complete(gets: list[bool], pending: list[list[int]], filled: list[list[int]]) -> None:
    for runs, waiting, row in zip(gets, pending, filled, strict=True):
        # The oldest first, because its residuals have occupied their slots longest.
        row.append(waiting.pop(0) if runs and waiting else IDLE)
