"""Putting the weight gradients of split backwards into a timetable, so that lockstep loses as little as it can."""

from collections.abc import Sequence

IDLE = -1

Row = Sequence[bool]
"""For each step, True if a stage runs something."""


def fill_weights(forwards: Sequence[Row], backwards: Sequence[Row], max_pending: int) -> tuple[tuple[int, ...], ...]:
    """Say in which step each stage runs which weight gradient, first in, first out.

    A step costs what its busiest stage runs. So a weight gradient costs nothing where the stage lacks the forward or
    the input gradient that others run, and no more than its own time where all stages run one together. Hence, step by
    step:

    - a stage that lacks what others run completes its oldest pending backward;
    - a step in which no stage lacks anything gets a weight gradient on every stage;
    - so does a step after which some stage would have to keep more than `max_pending`;
    - what is left comes in steps of its own at the end.

    Args:
        forwards: For each stage, the steps in which it runs a forward.
        backwards: For each stage, the steps in which it runs an input gradient.
        max_pending: The most input gradients that a stage may keep without their weight gradient.

    Returns:
        For each stage a row over steps, longer than the given ones by the steps at the end: the step of the input
        gradient that is completed, or -1.
    """
    stages = range(len(forwards))
    num_steps = len(forwards[0])
    pending: list[list[int]] = [[] for _ in stages]
    filled: list[list[int]] = [[] for _ in stages]
    for step in range(num_steps):
        present = [(row[step], inputs[step]) for row, inputs in zip(forwards, backwards, strict=True)]
        # Lockstep: every stage waits for the actions that any of them runs, so what a stage lacks is free time there.
        content = any(has for has, _ in present), any(has for _, has in present)
        gets = [actions != content for actions in present]
        # First, because a tick runs weight gradients last: one may follow its input gradient in the same step.
        for stage in stages:
            if present[stage][1]:
                pending[stage].append(step)
        # Where it must make the step longer, it does so once for all stages.
        if not any(gets) or _is_full(step, gets, pending, backwards, max_pending):
            gets = [True] * len(gets)
        _complete(gets, pending, filled)
    while any(pending):
        _complete([True] * len(pending), pending, filled)
    return tuple(map(tuple, filled))


def _is_full(step: int, gets: list[bool], pending: list[list[int]], backwards: Sequence[Row], limit: int) -> bool:
    """True if a stage that gets no weight gradient in this step has no room for the input gradient of the next."""
    following = step + 1
    return any(
        not runs and len(waiting) >= limit and following < len(row) and row[following]
        for runs, waiting, row in zip(gets, pending, backwards, strict=True)
    )


def _complete(gets: list[bool], pending: list[list[int]], filled: list[list[int]]) -> None:
    for runs, waiting, row in zip(gets, pending, filled, strict=True):
        # The oldest first: what waits for it has been held longest.
        row.append(waiting.pop(0) if runs and waiting else IDLE)
