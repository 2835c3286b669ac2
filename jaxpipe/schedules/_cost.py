"""Time that a tick program takes by the clock, and its idle share."""

from jaxpipe.errors import ScheduleError

from ._program import TickProgram


def makespan(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
    skip_idle: bool = True,
) -> float:
    """Give the time from the first to the last tick, exchanges costing nothing.

    In lockstep a tick takes as long as its busiest stage. Otherwise each stage goes through its actions in order and
    waits only for the values it needs.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through a whole stage, all its chunks.
        backward_s: Seconds of its whole backward.
        weight_s: Seconds of the weight gradient, if backwards are split; the input gradient takes the rest of
            `backward_s`. Default: half of it.
        lockstep: Whether stages wait for each other after each tick.
        skip_idle: Whether idle actions take no time. Otherwise, in lockstep, each tick runs every kind of action that
            its run holds.

    Returns:
        Seconds.

    Raises:
        ScheduleError: A time is negative, or the weight gradient is longer than the backward.
    """
    costs = _Costs(program, forward_s, backward_s, weight_s)
    return costs.lockstep(skip_idle=skip_idle) if lockstep else costs.free_running()


def bubble_fraction(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
    skip_idle: bool = True,
) -> float:
    """Give the idle share of a stage's time: `1 - work / makespan`.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through a whole stage.
        backward_s: Seconds of its whole backward; not counted in a program without backwards.
        weight_s: Seconds of the weight gradient, if backwards are split. Default: half of `backward_s`.
        lockstep: Whether stages wait for each other after each tick.
        skip_idle: Whether idle actions take no time. Otherwise, in lockstep, each tick runs every kind of action that
            its run holds.

    Returns:
        A fraction in [0, 1).

    Raises:
        ScheduleError: A time is negative, nothing takes any time, or the weight gradient is longer than the backward.
    """
    work = program.num_microbatches * (forward_s + (backward_s if program.training else 0.0))
    span = makespan(program, forward_s, backward_s, weight_s=weight_s, lockstep=lockstep, skip_idle=skip_idle)
    if work <= 0:
        raise ScheduleError(
            f"Some action must take time, but got forward_s={forward_s}, backward_s={backward_s}. Pass seconds above 0."
        )
    return 1.0 - work / span


class _Costs:
    def __init__(self, program: TickProgram, forward_s: float, backward_s: float, weight_s: float | None) -> None:
        weight = backward_s / 2 if weight_s is None else weight_s
        if min(forward_s, backward_s, weight) < 0 or weight > backward_s:
            raise ScheduleError(
                f"Times must not be negative, nor weight_s exceed backward_s, but got forward_s={forward_s}, "
                f"backward_s={backward_s}, weight_s={weight_s}. Pass seconds; backward_s is the whole backward."
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
        ticks = [[self._times(*each) for each in zip(*column, strict=True)] for column in zip(*columns, strict=True)]
        if skip_idle:
            # Within a tick a stage runs its actions one after another, and all stages wait for the one that takes
            # longest.
            return sum(max(map(sum, stages)) for stages in ticks)
        # Nothing is skipped: every device runs each kind of action of the run in each of its ticks.
        total = 0.0
        for run in self._program.runs:
            stages = [times for tick in ticks[run.start : run.stop] for times in tick]
            total += (run.stop - run.start) * sum(map(max, zip(*stages, strict=True)))
        return total

    def free_running(self) -> float:
        program, tables = self._program, self._program.tables
        forward_done: dict[tuple[int, int], float] = {}
        backward_done: dict[tuple[int, int], float] = {}
        now = [0.0] * program.num_stages
        # Ticks give the order alone. What a stage waits for was computed in an earlier one, so the order of the stages
        # within a tick does not matter.
        for tick in range(program.num_ticks):
            for stage in self._stages():
                microbatch = tables.forward.microbatch[stage][tick]
                if microbatch >= 0:
                    part = program.placement.virtual[stage][tables.forward.chunk[stage][tick]]
                    # Part 0 takes the batch, which is always there; likewise the last part its loss, below.
                    ready = forward_done.get((part - 1, microbatch), 0.0)
                    now[stage] = forward_done[part, microbatch] = max(now[stage], ready) + self._forward
                microbatch = tables.backward.microbatch[stage][tick]
                if microbatch >= 0:
                    part = program.placement.virtual[stage][tables.backward.chunk[stage][tick]]
                    ready = backward_done.get((part + 1, microbatch), 0.0)
                    split = tables.pending_write[stage][tick] >= 0
                    cost = self._half if split else self._whole
                    now[stage] = backward_done[part, microbatch] = max(now[stage], ready) + cost
                if tables.weight.microbatch[stage][tick] >= 0:
                    now[stage] += self._weight
        return max(now)

    def _stages(self) -> range:
        return range(self._program.num_stages)

    def _times(self, forward: int, backward: int, pending: int, weight: int) -> tuple[float, float, float]:
        """Times of a stage's forward, backward and weight gradient in a tick."""
        whole = self._half if pending >= 0 else self._whole
        times = ((forward, self._forward), (backward, whole), (weight, self._weight))
        ran, halved, completed = (time if microbatch >= 0 else 0.0 for microbatch, time in times)
        return ran, halved, completed
