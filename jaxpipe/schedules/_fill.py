"""Putting the weight gradients of split backwards into a timetable.

Lockstep is to lose as little by it as it can.
"""

from collections.abc import Sequence

IDLE = -1

Row = Sequence[bool]
"""For each step, True if a stage runs something."""


def fill_weights(
    forwards: Sequence[Row], backwards: Sequence[Row], max_pending: int
) -> tuple[tuple[int, ...], ...]:
    """Say in which step each stage runs which weight gradient, first in, first out.

    A step costs what its busiest stage runs. So a weight gradient costs nothing where a stage runs
    less than others do, and no more than its own time where all stages run one together. Hence,
    step by step:

    - a stage that runs fewer actions than another one completes its oldest pending backward;
    - a step in which all run equally many gets a weight gradient on every stage, as soon as each
      has one that it does not need for the free time of later steps;
    - so does a step after which some stage would have to keep more than `max_pending`;
    - what is left comes in steps of its own at the end.

    `forwards` and `backwards` tell for each stage the steps in which it runs a forward and an input
    gradient. The result has for each stage a row over steps, longer than these by the steps at the
    end: the step of the input gradient that is completed, or -1.
    """
    stages = range(len(forwards))
    num_steps = len(forwards[0])
    counts = [
        list(map(sum, zip(*rows, strict=True))) for rows in zip(forwards, backwards, strict=True)
    ]
    # Lockstep: every stage waits for the one that runs the most, so what a stage runs less is free
    # time there.
    has_room = [[count < max(each) for count in each] for each in zip(*counts, strict=True)]
    reserves = [_reserve([room[stage] for room in has_room], backwards[stage]) for stage in stages]
    pending: list[list[int]] = [[] for _ in stages]
    filled: list[list[int]] = [[] for _ in stages]
    for step in range(num_steps):
        # First, because a tick runs weight gradients last: one may follow its input gradient in the
        # same step.
        for stage in stages:
            if backwards[stage][step]:
                pending[stage].append(step)
        gets = has_room[step]
        is_due = not any(gets) and all(
            len(pending[stage]) > reserves[stage][step] for stage in stages
        )
        # Where it must make the step longer, it does so once for all stages.
        if is_due or _is_full(step, gets, pending, backwards, max_pending):
            gets = [True] * len(gets)
        _complete(gets, pending, filled)
    while any(pending):
        _complete([True] * len(pending), pending, filled)
    return tuple(map(tuple, filled))


def _reserve(has_room: Row, backwards: Row) -> list[int]:
    """For each step how many a stage must keep pending after it, to fill its free time later."""
    reserve = 0
    reserves: list[int] = []
    for room, runs in zip(reversed(has_room), reversed(backwards), strict=True):
        reserves.append(reserve)
        reserve = max(0, reserve + room - runs)
    return reserves[::-1]


def _is_full(
    step: int, gets: list[bool], pending: list[list[int]], backwards: Sequence[Row], limit: int
) -> bool:
    """True if a stage has no room for the input gradient of the next step.

    This is asked of stages that get no weight gradient in this step.
    """
    following = step + 1
    return any(
        not runs and len(waiting) >= limit and following < len(row) and row[following]
        for runs, waiting, row in zip(gets, pending, backwards, strict=True)
    )


def _complete(gets: list[bool], pending: list[list[int]], filled: list[list[int]]) -> None:
    for runs, waiting, row in zip(gets, pending, filled, strict=True):
        # The oldest first, because its residuals have occupied their slots longest.
        row.append(waiting.pop(0) if runs and waiting else IDLE)
