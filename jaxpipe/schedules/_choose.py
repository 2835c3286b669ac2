"""Choosing a schedule from what a stage costs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxpipe.errors import ScheduleError

from ._choice import Candidate, Choice, StageCosts, gigabytes
from ._cost import ShortSteps, makespan
from ._lowering import lower_schedule
from ._program import TickProgram, TickRun
from ._resolve import resolve_schedule, schedule_names

CLEAR_GAIN = 0.01
"""Share of the step that a less simple schedule must gain to be preferred."""

CHUNK_COUNTS = (1, 2, 4)
"""Numbers of chunks that are looked at where none is asked for."""

_EVEN_CHUNKS: Mapping[int, float] = MappingProxyType(dict.fromkeys(CHUNK_COUNTS, 1.0))


def choose_schedule(
    costs: StageCosts,
    num_stages: int,
    num_microbatches: int,
    *,
    memory_limit_bytes: float | None = None,
    chunk_counts: Mapping[int, float] = _EVEN_CHUNKS,
    max_pending: int | None = None,
    skip_idle: bool | None = None,
    names: Collection[str] | None = None,
) -> Choice:
    """Choose the schedule with the shortest step whose activations fit.

    Each candidate is lowered and its ticks are added up: in lockstep a tick takes as long as its busiest stage (where
    idle actions are skipped) or as long as all kinds of actions of its run together (where they are computed), and the
    overheads. Several chunks cost loops that add to the sums of each, and copies of weights where idle actions are
    computed. Candidates are the schedules of `schedule_names` that are auto candidates (all but `"gpipe"`) with all
    numbers of chunks that each can have, with idle actions skipped and computed. One with split backwards that does not
    fit is tried again with as many pending weight gradients as do fit. The simplest within `CLEAR_GAIN` of the shortest
    step wins; where nothing fits, the smallest memory.

    Args:
        costs: What a microbatch costs on the largest stage.
        num_stages: Pipeline stages.
        num_microbatches: Microbatches in a batch.
        memory_limit_bytes: What activations and pending weight gradients may take on a device, beside parameters,
            gradients, optimiser state and what is recomputed at once. Default: any number.
        chunk_counts: Numbers of chunks to look at, and how many times its share of the largest stage the largest of so
            many chunks takes: 1 where they come out equal. Default: 1, 2 and 4 equal chunks.
        max_pending: The most weight gradients that a schedule may keep pending. Default: the schedule's own number.
        skip_idle: Whether idle actions are skipped. Default: both are looked at.
        names: The schedules to look at. Default: all candidates.

    Returns:
        The choice, with all candidates.

    Raises:
        ScheduleError: A cost is negative, the work takes no time, or no schedule is left to choose from.

    Example:
        >>> costs = StageCosts(forward_s=0.010, input_s=0.010, weight_s=0.010, activation_bytes=1e9, pending_bytes=5e8)
        >>> choose_schedule(costs, num_stages=4, num_microbatches=16).best.schedule
        'zero-bubble'
    """
    if costs.work_s <= 0 or any(cost is not None and cost < 0 for cost in vars(costs).values()):
        raise ScheduleError(
            f"Costs must not be negative and the work must take time, but got {costs}. Measure a stage's forward and "
            "backward, in seconds."
        )
    if not chunk_counts or min(chunk_counts) < 1 or min(chunk_counts.values()) <= 0:
        raise ScheduleError(
            "chunk_counts must hold positive numbers of chunks and, with each, how many times an equal share its "
            f"largest chunk takes, but got chunk_counts={dict(chunk_counts)}. Give {{1: 1.0}} for one chunk a stage."
        )
    chooser = _Chooser(costs, num_stages, num_microbatches, memory_limit_bytes, chunk_counts, max_pending)
    policies = (False, True) if skip_idle is None else (skip_idle,)
    candidates = tuple(
        one
        for name, kind in schedule_names().items()
        for chunks in sorted(chunk_counts)
        if kind.is_auto_candidate and (names is None or name in names) and kind.can_have(chunks)
        for one in chooser.candidates(name, chunks, policies)
    )
    fitting = [one for one in candidates if one.fits]
    shortest = min(fitting, key=lambda one: one.step_s, default=None)
    if shortest is None:
        best = min(candidates, key=lambda one: (one.memory_bytes, one.step_s))
        reason = "Nothing fits; this holds the least. Recompute activations, or use smaller microbatches."
    else:
        # Candidates stand in order of simplicity, so the first that is close enough is the simplest of those.
        best = next(one for one in fitting if one.step_s <= shortest.step_s * (1 + CLEAR_GAIN))
        reason = f"The simplest within {CLEAR_GAIN:.0%} of the shortest step"
        reason += "." if memory_limit_bytes is None else f" that fits {gigabytes(memory_limit_bytes)}."
    ideal_s = num_microbatches * costs.work_s
    return Choice(best, candidates, ideal_s, memory_limit_bytes, f"{best.schedule}: {reason}")


@dataclass(frozen=True)
class _Chooser:
    """Costs the candidates of one model on one pipeline."""

    costs: StageCosts
    num_stages: int
    num_microbatches: int
    limit: float | None
    chunk_counts: Mapping[int, float]
    max_pending: int | None

    def candidates(self, schedule: str, num_chunks: int, policies: Sequence[bool]) -> list[Candidate]:
        """A schedule with each way to treat idle actions, and with fewer pending where all are too large."""
        most = None if schedule_names()[schedule].min_pending is None else self.max_pending
        found = self._costed(schedule, num_chunks, most, policies)
        # Memory is the same whether idle actions are skipped, so the first speaks for all.
        if found[0].fits or not found[0].pending or not self.costs.pending_bytes:
            return found
        room = (self.limit or 0) - found[0].in_flight * self.costs.activation_bytes
        fitting = int(room * num_chunks / self.costs.pending_bytes)
        return found + (self._costed(schedule, num_chunks, fitting, policies) if fitting >= 1 else [])

    def _costed(
        self, schedule: str, num_chunks: int, max_pending: int | None, policies: Sequence[bool]
    ) -> list[Candidate]:
        costs, kind = self.costs, resolve_schedule(schedule, num_chunks, max_pending)
        steps = ShortSteps.of(kind, self.num_microbatches, self.num_stages)
        program, shorter = (lower_schedule(kind, size, self.num_stages) for size in (steps.long, steps.short))

        def extended(of: Callable[[TickProgram], float]) -> float:
            return steps.extended(of(program), of(shorter))

        in_flight, pending = program.residual_slots / num_chunks, program.depth.pending / num_chunks
        memory = in_flight * costs.activation_bytes + pending * costs.pending_bytes
        return [
            Candidate(
                schedule,
                num_chunks,
                max_pending,
                skip_idle,
                step_s=extended(lambda program, skip_idle=skip_idle: self._step_s(program, skip_idle=skip_idle)),
                num_ticks=int(extended(lambda program: program.num_ticks)),
                in_flight=in_flight,
                pending=pending,
                memory_bytes=memory,
                fits=self.limit is None or memory <= self.limit,
            )
            for skip_idle in policies
        ]

    def _step_s(self, program: TickProgram, *, skip_idle: bool) -> float:
        costs = self.costs
        # Given apart, since a whole backward may take less than its two parts: what both need is computed or read once.
        backward_s = costs.input_s + costs.weight_s if program.has_split_backward else costs.whole_backward_s
        span = makespan(
            program, costs.forward_s, backward_s, weight_s=min(costs.weight_s, backward_s), skip_idle=skip_idle
        )
        num_chunks, branches, copies = program.num_chunks, 0, 0
        for run in program.runs:
            num_ticks = run.stop - run.start
            if skip_idle:
                branches += num_ticks * _branches(program, run)
            elif num_chunks > 1:
                # The weights of a chunk that is an index are taken out of those of all, by each action.
                copies += num_ticks * (run.has_forward + run.has_backward)
            if num_chunks > 1:
                # Each chunk's sums are added to in a loop of their own, which asks before each round: once for those
                # that have none, twice for the one that has one.
                branches += num_ticks * (num_chunks + 1) * (run.has_backward + run.has_weight)
        overhead_s = program.num_ticks * costs.tick_overhead_s + branches * costs.branch_overhead_s
        return self.chunk_counts[num_chunks] * span + overhead_s + copies * costs.copy_s / num_chunks


def _branches(program: TickProgram, run: TickRun) -> int:
    """Kinds of actions that need a branch in each tick of a run: those that may be idle, or be of several chunks."""
    count = 0
    for actions in (program.tables.forward, program.tables.backward, program.tables.weight):
        chunks = {chunk for row in actions.chunk for chunk in row[run.start : run.stop]}
        count += len(chunks) > 1  # idle actions have chunk -1
    return count
