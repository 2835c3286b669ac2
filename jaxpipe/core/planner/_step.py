"""A step's time: every stage runs the ticks and waits for the stages that it exchanges with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.schedules import Idle, PipeSchedule, TickProgram, TickRun

_BRANCHES_OF_ENDS = 3
"""Conditionals per tick around the first layers, their backward, and the last layers and loss."""


_STEADY = 3
"""Number of groups of S microbatches after which a steady schedule repeats."""


class ShortSteps(NamedTuple):
    """Two short steps from which the time of a step with many microbatches is extrapolated.

    They save time, because lowering takes time in proportion to the microbatches.

    Attributes:
        long: Microbatches of the longer step.
        short: Microbatches of the shorter step, one group of S less. Equal to `long` if there is
            nothing to extrapolate.
        rounds: Number of groups of S in the whole step beyond the longer step.
    """

    long: int
    short: int
    rounds: int

    @staticmethod
    def of(schedule: type[PipeSchedule], num_microbatches: int, num_stages: int) -> "ShortSteps":
        """Return the short steps of a schedule, or the whole step if it is short or not steady."""
        # The remainder of M / S is kept because it changes the tables. There are enough groups that
        # none gets more than one microbatch of it, as in the whole step.
        remainder = num_microbatches % num_stages
        long = max(_STEADY, remainder + 1) * num_stages + remainder
        if not schedule.is_steady or long >= num_microbatches:
            return ShortSteps(num_microbatches, num_microbatches, 0)
        return ShortSteps(long, long - num_stages, (num_microbatches - long) // num_stages)

    def extended(self, of_long: float, of_short: float) -> float:
        """Extrapolate a value of the whole step from those of the two short steps."""
        return of_long + self.rounds * (of_long - of_short)


@dataclass(frozen=True)
class PartTime:
    """Seconds of one virtual stage's actions.

    Attributes:
        forward: Forward of the trunk, including its writes to the ring buffer.
        backward: Whole backward of the trunk, including the gradient sums.
        input: Only the input gradient of the trunk.
        weight: Only the weight gradient of the trunk, including the gradient sums.
        first: Forward of the layers before the trunk.
        first_backward: Backward of the layers before the trunk.
        last: Layers after the trunk and the loss, forward and backward.
        ring: Writes of a forward to the ring buffer.
        first_sums: Additions to the gradient sums of all parameters outside the trunk in a
            backward, which every stage does.
        last_sums: The same after a loss.
    """

    forward: float
    backward: float
    input: float
    weight: float
    first: float
    first_backward: float
    last: float
    ring: float = 0.0
    first_sums: float = 0.0
    last_sums: float = 0.0


@dataclass(frozen=True)
class Wire:
    """Seconds of communication for one microbatch.

    Attributes:
        hop: A send from one stage to the next.
        ends: Exposed collectives of vocabulary-parallel layers in a tick.
        ends_work: Computation of vocabulary-parallel layers on each stage.
        gather: Exposed gathers of weights by an action.
        meets_for_loss: Whether all stages compute a loss together, in the last layers' collectives.
    """

    hop: float
    ends: float = 0.0
    ends_work: float = 0.0
    gather: float = 0.0
    meets_for_loss: bool = False


@dataclass(frozen=True)
class Span:
    """Seconds of the ticks of a step.

    Attributes:
        total: Time from the first to the last tick.
        work: Time that the busiest stage works for microbatches.
        exposed: Time of exposed exchanges, on the stage with the most.
        num_ticks: Number of ticks.
    """

    total: float
    work: float
    exposed: float
    num_ticks: int


def span_of(program: TickProgram, parts: Sequence[PartTime], wire: Wire, branch_s: float) -> Span:
    """Simulate the ticks, with idle actions as planned for each run."""
    stages = range(program.num_stages)
    now, work, exposed = ([0.0] * program.num_stages for _ in range(3))
    has_ends = any(part.first or part.last for part in parts)
    for run in program.runs:
        sends = [_Sends.of(run, stage) for stage in stages]
        plans = [plan for plan in (run.forward, run.backward, run.weight) if plan is not None]
        branches = (_BRANCHES_OF_ENDS if has_ends else 0) + sum(plan.has_branches for plan in plans)
        for tick in range(run.start, run.stop):
            actions = _Actions(program, parts, wire, run, tick)
            has_loss = any(program.tables.loss_microbatch[s][tick] >= 0 for s in stages)
            starts = [max(now[other] for other in sends[s].partners) for s in stages]
            costs = [actions.seconds(s) for s in stages]
            if has_loss and wire.meets_for_loss:  # no stage continues before all have arrived
                before = [0.0 if program.delays_loss else cost.forward for cost in costs]
                met = max(start + cost for start, cost in zip(starts, before, strict=True))
                starts = [met - cost for cost in before]
            for stage in stages:
                useful, idle, _ = costs[stage]
                cost = useful + idle + branches * branch_s
                # In ticks with a forward and a backward, one of them overlaps the exchanges. While
                # the pipeline fills or drains, and if exchanges end before the forward, nothing
                # overlaps them.
                hop = wire.hop * bool(sends[stage].number)
                if run.receives_first:
                    hop = wire.hop * sends[stage].number
                elif run.has_forward and run.has_backward:
                    hop = max(0.0, hop - cost)
                bare = hop + has_loss * wire.ends
                work[stage] += useful
                exposed[stage] += bare
                now[stage] = starts[stage] + cost + bare
    return Span(
        max(now, default=0.0), max(work, default=0.0), max(exposed, default=0.0), program.num_ticks
    )


class _Sends(NamedTuple):
    """Exchanges of a stage in a tick of a run.

    Attributes:
        partners: The stages that it exchanges with, including itself.
        number: Number of exchanges that it takes part in.
    """

    partners: set[int]
    number: int

    @staticmethod
    def of(run: TickRun, stage: int) -> "_Sends":
        """Return the exchanges of one stage."""
        sends = [*run.activation_sends.values(), *run.gradient_sends.values()]
        mine = [[pair for pair in each if stage in pair] for each in sends]
        partners = {other for pairs in mine for pair in pairs for other in pair}
        return _Sends(partners | {stage}, sum(map(bool, mine)))


class _Cost(NamedTuple):
    """Seconds of a stage in a tick.

    Attributes:
        useful: Seconds of the stage's actions.
        idle: Seconds of idle actions that the stage computes and drops.
        forward: The part of both that runs before the loss of this tick.
    """

    useful: float
    idle: float
    forward: float


@dataclass(frozen=True)
class _Actions:
    """Actions of all stages in a tick."""

    program: TickProgram
    parts: Sequence[PartTime]
    wire: Wire
    run: TickRun
    tick: int

    def seconds(self, stage: int) -> _Cost:
        """Return the seconds of a stage."""
        tables = self.program.tables
        tick = self.tick
        gather = self.wire.gather
        any_part = self.parts[self.program.placement.virtual[stage][0]]
        useful = idle = 0.0
        forward, backward, weight = (
            self._part(stage, kind.chunk[stage][tick])
            for kind in (tables.forward, tables.backward, tables.weight)
        )
        if forward is not None:
            useful += forward.forward + forward.first + forward.last + gather
        elif self.run.forward is not None and self.run.forward.idle is Idle.MASK:
            idle += any_part.forward + gather
        elif self.run.forward is not None and self.run.forward.idle is Idle.BRANCH:
            idle += any_part.ring  # zeros are filled in and copied to an unused slot
        before_loss = useful + idle
        if backward is not None:
            is_split = tables.pending_write[stage][tick] >= 0
            useful += (
                (backward.input if is_split else backward.backward)
                + backward.first_backward
                + gather
            )
        elif self.run.backward is not None and self.run.backward.idle is Idle.MASK:
            idle += any_part.backward + gather
        if weight is not None:
            useful += weight.weight
        for has_action, sums_s in self._sums(any_part, forward, backward):
            useful += has_action * sums_s
            idle += (not has_action) * sums_s
        if tables.loss_microbatch[stage][tick] >= 0:
            useful += self.wire.ends_work
        return _Cost(useful, idle, before_loss)

    def _sums(
        self, part: PartTime, forward: PartTime | None, backward: PartTime | None
    ) -> list[tuple[bool, float]]:
        """Return the seconds of each addition to sums outside the trunk; False if it adds zeros."""
        plan = self.run.backward
        found = list[tuple[bool, float]]()
        if plan is not None and (backward is not None or plan.idle is not Idle.LOOP):
            found.append((backward is not None, part.first_sums))
        if self.run.loss is not None:
            found.append((forward is not None, part.last_sums))
        return found

    def _part(self, stage: int, chunk: int) -> PartTime | None:
        return None if chunk < 0 else self.parts[self.program.placement.virtual[stage][chunk]]
