"""The time that a tick program takes, and the idle share of that time."""

from typing import Literal, NamedTuple

from jaxpipe.errors import ScheduleError

from ._program import Actions, Table, TickProgram

Kind = Literal["forward", "backward", "input gradient", "weight gradient"]
"""What an action computes. A backward that is not split has the kind `"backward"`."""


class Slice(NamedTuple):
    """One action of a step, with its times.

    Attributes:
        stage: The stage.
        tick: The tick.
        kind: What the action computes.
        part: The virtual stage, counted from the input.
        microbatch: The microbatch.
        start_s: Start, in seconds from the beginning of the step.
        end_s: End, in seconds from the beginning of the step.
    """

    stage: int
    tick: int
    kind: Kind
    part: int
    microbatch: int
    start_s: float
    end_s: float


def makespan(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
    skip_idle: bool = True,
) -> float:
    """Return the time from the first to the last tick, assuming that exchanges take no time.

    In lockstep a tick takes as long as its busiest stage. Otherwise each stage runs its actions in
    order and waits only for the values that it needs.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through all chunks of a stage.
        backward_s: Seconds of the whole backward of that microbatch.
        weight_s: Seconds of the weight gradient, if backwards are split. The input gradient takes
            the rest of `backward_s`. Default: half of `backward_s`.
        lockstep: Whether stages wait for each other after each tick.
        skip_idle: Whether idle actions take no time. Otherwise, in lockstep, each tick runs every
            kind of action that occurs in its run.

    Returns:
        Seconds.

    Raises:
        ScheduleError: A time is negative, or the weight gradient is longer than the backward.
    """
    costs = _Costs(program, forward_s, backward_s, weight_s)
    return (
        costs.lockstep(skip_idle=skip_idle)
        if lockstep
        else max(one.end_s for one in costs.slices(lockstep=False))
    )


def timeline(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
) -> tuple[Slice, ...]:
    """Return every action of a step with its times.

    Exchanges and idle actions are assumed to take no time.

    Args:
        program: The program.
        forward_s: As for `makespan`.
        backward_s: As for `makespan`.
        weight_s: As for `makespan`.
        lockstep: As for `makespan`.

    Returns:
        The actions, tick by tick. The last one ends at `makespan`.

    Raises:
        ScheduleError: A time is negative, or the weight gradient is longer than the backward.
    """
    return tuple(_Costs(program, forward_s, backward_s, weight_s).slices(lockstep=lockstep))


def bubble_fraction(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
    skip_idle: bool = True,
) -> float:
    """Return the idle share of a stage's time: `1 - work / makespan`.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through a whole stage.
        backward_s: Seconds of the whole backward of that microbatch. Not counted in a program
            without backwards.
        weight_s: Seconds of the weight gradient, if backwards are split. Default: half of
            `backward_s`.
        lockstep: Whether stages wait for each other after each tick.
        skip_idle: Whether idle actions take no time. Otherwise, in lockstep, each tick runs every
            kind of action that occurs in its run.

    Returns:
        A fraction in [0, 1).

    Raises:
        ScheduleError: A time is negative, all times are zero, or the weight gradient is longer than
            the backward.
    """
    work = program.num_microbatches * (forward_s + (backward_s if program.training else 0.0))
    span = makespan(
        program, forward_s, backward_s, weight_s=weight_s, lockstep=lockstep, skip_idle=skip_idle
    )
    if work <= 0:
        raise ScheduleError(
            "At least one action must take time, but got "
            f"forward_s={forward_s}, backward_s={backward_s}. Pass seconds above 0."
        )
    return 1.0 - work / span


class _Costs:
    def __init__(
        self, program: TickProgram, forward_s: float, backward_s: float, weight_s: float | None
    ) -> None:
        weight = backward_s / 2 if weight_s is None else weight_s
        if min(forward_s, backward_s, weight) < 0 or weight > backward_s:
            raise ScheduleError(
                "Times must not be negative and weight_s must not exceed backward_s, but got "
                f"forward_s={forward_s}, backward_s={backward_s}, weight_s={weight_s}. Pass "
                "seconds; backward_s is the whole backward."
            )
        self._program = program
        self._forward = forward_s / program.num_chunks
        self._whole = backward_s / program.num_chunks
        self._weight = weight / program.num_chunks
        self._half = self._whole - self._weight

    def lockstep(self, *, skip_idle: bool) -> float:
        tables = self._program.tables
        actions = (
            tables.forward.microbatch,
            tables.backward.microbatch,
            tables.pending_write,
            tables.weight.microbatch,
        )
        columns = [list(zip(*table, strict=True)) for table in actions]
        ticks = [
            [self._times(*each) for each in zip(*column, strict=True)]
            for column in zip(*columns, strict=True)
        ]
        if skip_idle:
            # Within a tick a stage runs its actions one after another, and all stages wait for the
            # one that takes longest.
            return sum(max(map(sum, stages)) for stages in ticks)
        # Nothing is skipped: in each tick every device runs every kind of action of the run.
        total = 0.0
        for run in self._program.runs:
            stages = [times for tick in ticks[run.start : run.stop] for times in tick]
            total += (run.stop - run.start) * sum(map(max, zip(*stages, strict=True)))
        return total

    def slices(self, *, lockstep: bool) -> list[Slice]:
        """Return every action with its times, in the order of the ticks."""
        program = self._program
        tables = self._program.tables
        done: dict[tuple[bool, int, int], float] = {}
        now = [0.0] * program.num_stages
        found: list[Slice] = []

        def run(
            stage: int,
            tick: int,
            kind: Kind,
            actions: Actions[Table],
            cost: float,
            after: int | None,
        ) -> None:
            microbatch = actions.microbatch[stage][tick]
            if microbatch < 0:
                return
            part = program.placement.virtual[stage][actions.chunk[stage][tick]]
            is_forward = kind == "forward"
            # Some actions never wait: virtual stage 0 reads the batch, the last virtual stage
            # starts from the loss, and a weight gradient needs only values of its own stage.
            ready = 0.0 if after is None else done.get((is_forward, part + after, microbatch), 0.0)
            start = max(now[stage], ready)
            now[stage] = start + cost
            if after is not None:
                done[is_forward, part, microbatch] = now[stage]
            found.append(Slice(stage, tick, kind, part, microbatch, start, now[stage]))

        # A stage waits only for values of earlier ticks, so the order of the stages within a tick
        # does not matter.
        for tick in range(program.num_ticks):
            for stage in range(program.num_stages):
                is_split = tables.pending_write[stage][tick] >= 0
                run(stage, tick, "forward", tables.forward, self._forward, -1)
                if is_split:
                    run(stage, tick, "input gradient", tables.backward, self._half, 1)
                else:
                    run(stage, tick, "backward", tables.backward, self._whole, 1)
                run(stage, tick, "weight gradient", tables.weight, self._weight, None)
            if lockstep:
                now = [max(now)] * program.num_stages
        return found

    def _times(
        self, forward: int, backward: int, pending: int, weight: int
    ) -> tuple[float, float, float]:
        """Return the times of a stage's forward, backward and weight gradient in a tick."""
        whole = self._half if pending >= 0 else self._whole
        times = ((forward, self._forward), (backward, whole), (weight, self._weight))
        ran, halved, completed = (time if microbatch >= 0 else 0.0 for microbatch, time in times)
        return ran, halved, completed
