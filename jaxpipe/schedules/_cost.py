"""What a tick program costs by the clock, and how much of it is idle."""

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules._program import TickProgram


def makespan(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
) -> float:
    """Give the time from the first to the last tick, exchanges costing nothing.

    In lockstep a tick takes as long as its busiest stage. Otherwise each stage goes through its cells in order and
    waits only for the values it needs.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through a whole stage, all its chunks.
        backward_s: Seconds of its whole backward.
        weight_s: Seconds of the weight half, if backwards are split; the input half takes the rest of `backward_s`.
            Default: half of `backward_s`.
        lockstep: Whether stages wait for each other after each tick.

    Returns:
        Seconds.

    Raises:
        ScheduleError: A time is negative, or the weight half is longer than the backward.
    """
    costs = _Costs(program, forward_s, backward_s, weight_s)
    return costs.lockstep() if lockstep else costs.free_running()


def bubble_fraction(
    program: TickProgram,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    lockstep: bool = True,
) -> float:
    """Give the idle share of a stage's time: `1 - work / makespan`.

    Args:
        program: The program.
        forward_s: Seconds of the forward of one microbatch through a whole stage.
        backward_s: Seconds of its whole backward; not counted in a program without backwards.
        weight_s: Seconds of the weight half, if backwards are split. Default: half of `backward_s`.
        lockstep: Whether stages wait for each other after each tick.

    Returns:
        A fraction in [0, 1).

    Raises:
        ScheduleError: A time is negative, nothing takes any time, or the weight half is longer than the backward.
    """
    work = program.num_microbatches * (forward_s + (backward_s if program.training else 0.0))
    span = makespan(program, forward_s, backward_s, weight_s=weight_s, lockstep=lockstep)
    if work <= 0:
        raise ScheduleError(
            f"Some cell must take time, but got forward_s={forward_s}, backward_s={backward_s}. Pass seconds above 0."
        )
    return 1.0 - work / span


class _Costs:
    def __init__(self, program: TickProgram, forward_s: float, backward_s: float, weight_s: float | None) -> None:
        weight = backward_s / 2 if weight_s is None else weight_s
        if min(forward_s, backward_s, weight) < 0 or weight > backward_s:
            raise ScheduleError(
                f"Times must not be negative, nor weight_s exceed backward_s, but got forward_s={forward_s}, "
                f"backward_s={backward_s}, weight_s={weight_s}. Pass seconds; backward_s holds both halves."
            )
        self._program = program
        self._forward = forward_s / program.num_chunks
        self._whole = backward_s / program.num_chunks
        self._weight = weight / program.num_chunks
        self._half = self._whole - self._weight

    def lockstep(self) -> float:
        names = ("forward_microbatch", "backward_microbatch", "pending_write", "weight_microbatch")
        tables = [self._program.tables[name] for name in names]
        total = 0.0
        for tick in range(self._program.num_ticks):
            total += max(self._cell(*(table[stage][tick] for table in tables)) for stage in self._stages())
        return total

    def free_running(self) -> float:
        program, tables = self._program, self._program.tables
        forward_done: dict[tuple[int, int], float] = {}
        backward_done: dict[tuple[int, int], float] = {}
        now = [0.0] * program.num_stages
        for tick in range(program.num_ticks):
            for stage in self._stages():
                microbatch = tables["forward_microbatch"][stage][tick]
                if microbatch >= 0:
                    part = program.placement[stage][tables["forward_chunk"][stage][tick]]
                    ready = forward_done.get((part - 1, microbatch), 0.0)
                    now[stage] = forward_done[part, microbatch] = max(now[stage], ready) + self._forward
                microbatch = tables["backward_microbatch"][stage][tick]
                if microbatch >= 0:
                    part = program.placement[stage][tables["backward_chunk"][stage][tick]]
                    ready = backward_done.get((part + 1, microbatch), 0.0)
                    split = tables["pending_write"][stage][tick] >= 0
                    cost = self._half if split else self._whole
                    now[stage] = backward_done[part, microbatch] = max(now[stage], ready) + cost
                if tables["weight_microbatch"][stage][tick] >= 0:
                    now[stage] += self._weight
        return max(now)

    def _stages(self) -> range:
        return range(self._program.num_stages)

    def _cell(self, forward: int, backward: int, pending: int, weight: int) -> float:
        cost = self._forward if forward >= 0 else 0.0
        if backward >= 0:
            cost += self._half if pending >= 0 else self._whole
        return cost + (self._weight if weight >= 0 else 0.0)
