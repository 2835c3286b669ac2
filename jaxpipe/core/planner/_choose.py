"""The candidates of a job, the best first.

`"auto"` chooses from them, and `jaxpipe plan` shows them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.config import PipelineConfig, unless_auto
from jaxpipe.errors import PartitionError, ScheduleError
from jaxpipe.schedules import PipeSchedule, lower_schedule, resolve_schedule, schedule_names
from jaxpipe.schedules.partition import StageMemory, profile_source

from ._candidate import Candidate
from ._cut import cut_parts, stage_memory
from ._forecast import Forecast
from ._job import Job
from ._step import ShortSteps

CLEAR_GAIN = 0.01
"""A less simple schedule must shorten the step by at least this share to be preferred."""

_CHUNK_COUNTS = (1, 2, 4)
"""Numbers of chunks that are evaluated if none is requested."""


@dataclass(frozen=True)
class SearchSpace:
    """The candidates to evaluate.

    Attributes:
        schedules: Names of schedules, the simplest first.
        num_chunks: Numbers of chunks. None: those that the schedules and the cut support.
        max_pending: The most pending weight gradients. None: the schedule's own number, or as many
            as fit.
        partitions: Partition methods or boundaries. Empty: the method of the job's model.
        recompute: Layers per recomputed group, 0 for none. Empty: those of the job's model.
    """

    schedules: tuple[str, ...]
    num_chunks: tuple[int, ...] | None
    max_pending: int | None
    partitions: tuple[str | tuple[int, ...], ...] = ()
    recompute: tuple[int, ...] = ()

    @staticmethod
    def of(section: PipelineConfig) -> "SearchSpace":
        """Return the candidates that a configuration leaves open."""
        num_chunks = unless_auto(section.num_chunks)
        name = section.schedule
        if isinstance(name, str) and name != "auto":
            return SearchSpace((name,), (resolve_schedule(name, num_chunks).num_chunks,), None)
        counts = None if num_chunks is None else (num_chunks,)
        return SearchSpace(auto_schedules(), counts, unless_auto(section.max_pending_weights))


def auto_schedules() -> tuple[str, ...]:
    """Return the names of the schedules that `"auto"` considers, the simplest first."""
    return tuple(name for name, kind in schedule_names().items() if kind.is_auto_candidate)


def limits_pending(section: PipelineConfig) -> bool:
    """Return whether a set memory limit decides how many weight gradients may be pending."""
    kind = schedule_names().get(section.schedule) if isinstance(section.schedule, str) else None
    is_open = section.max_pending_weights == "auto" and section.memory_limit_gb != "auto"
    return is_open and kind is not None and kind.min_pending is not None


def candidates(job: Job, space: SearchSpace) -> list[Forecast]:
    """Evaluate all candidates of a job, in the requested order.

    A candidate with split backwards that does not fit is followed by a second one, limited to as
    many pending weight gradients as fit.
    """
    found = dict[tuple[Any, ...], Forecast]()
    errors = list[PartitionError | ScheduleError]()
    for interval in space.recompute or (job.module.activation_checkpoint_interval,):
        counted = job.counted.recomputing(interval)
        for method in space.partitions or (job.module.partition_method,):
            try:
                module = counted.module.replace(partition_method=method)
                some = _of_method(dataclasses.replace(job, module=module, counted=counted), space)
            except (PartitionError, ScheduleError) as error:
                errors.append(error)
                continue
            # Two methods may give the same cut, which is then listed once.
            for one in some:
                key = one.recompute, one.schedule, one.boundaries, one.max_pending
                found.setdefault(key, one)
    if not found:
        raise errors[0]
    return list(found.values())


def _of_method(job: Job, space: SearchSpace) -> list[Forecast]:
    """Evaluate the candidates with the partition method and the recompute of the job's model."""
    found = list[Forecast]()
    errors = list[PartitionError]()

    # Schedules with the same number of chunks share a cut, unless the cut depends on their memory.
    @functools.cache
    def cut(num_parts: int, memory: StageMemory | None) -> Candidate:
        return Candidate(
            job,
            cut_parts(
                job.module, job.trace, job.cut_costs, num_parts, job.counted.signatures, memory
            ),
        )

    for name in space.schedules:
        most = None if schedule_names()[name].min_pending is None else space.max_pending
        for num_chunks in _chunk_counts(name, job, space):
            schedule = resolve_schedule(name, num_chunks, most)
            try:
                candidate = cut(num_chunks * job.module.num_stages, _memory(job, schedule))
            except PartitionError as error:
                errors.append(error)
                continue
            one = candidate.forecast(name, schedule, most)
            found.append(one)
            fewer = _fitting_pending(job, one)
            if fewer:
                found.append(
                    candidate.forecast(name, resolve_schedule(name, num_chunks, fewer), fewer)
                )
    if not found:
        raise errors[0] if errors else _no_chunks(space)
    return found


def ranked(found: Sequence[Forecast]) -> list[Forecast]:
    """Sort candidates, the best first; they must be given in order of simplicity."""

    def rank(one: Forecast) -> tuple[bool, bool]:
        return not one.fits, schedule_names()[one.schedule].is_last_resort

    by_step = sorted(found, key=lambda one: (rank(one), one.step_s))
    first = by_step[0]
    if first.fits:
        # The simplest within `CLEAR_GAIN` of the shortest step.
        best = next(
            one
            for one in found
            if rank(one) == rank(first) and one.step_s <= first.step_s * (1 + CLEAR_GAIN)
        )
    else:
        # Nothing fits: the smallest is the nearest to something that would.
        best = min(by_step, key=lambda one: (one.memory.total, one.step_s))
    return [best, *(one for one in by_step if one is not best)]


def with_schedule(section: PipelineConfig, one: Forecast) -> PipelineConfig:
    """Return the section `pipeline` with the schedule of a candidate."""
    return dataclasses.replace(
        section,
        schedule=one.schedule,
        num_chunks=one.num_chunks,
        max_pending_weights="auto" if one.max_pending is None else one.max_pending,
    )


def _chunk_counts(name: str, job: Job, space: SearchSpace) -> list[int]:
    """Return the numbers of chunks to evaluate that a schedule supports."""
    kind = schedule_names()[name]
    method = job.module.partition_method
    counts = space.num_chunks
    if counts is None and not isinstance(method, str):
        counts = (max(1, (len(method) - 1) // job.module.num_stages),)
    if counts is None:
        counts = (kind.num_chunks,) if kind.min_chunks is None else _CHUNK_COUNTS
    return [count for count in counts if kind.can_have(count)]


def _memory(job: Job, schedule: type[PipeSchedule]) -> StageMemory | None:
    """Return the memory of each virtual stage of a cut, if the partition method uses it."""
    if profile_source(job.module.partition_method) is None:
        return None
    steps = ShortSteps.of(schedule, job.num_microbatches, job.module.num_stages)
    program = lower_schedule(schedule, steps.long, job.module.num_stages)
    return stage_memory(program, job.bytes_per_param, job.limit_bytes)


def _fitting_pending(job: Job, one: Forecast) -> int:
    """Return how many pending weight gradients fit if a candidate does not; 0 if none fit."""
    if one.fits or job.limit_bytes is None or not one.memory.pending:
        return 0
    room = job.limit_bytes - (one.memory.total - one.memory.pending)
    return max(0, int(room / (one.memory.pending / one.pending)))


def _no_chunks(space: SearchSpace) -> ScheduleError:
    names = ", ".join(map(repr, space.schedules))
    counts = space.num_chunks
    return ScheduleError(
        f"num_chunks must suit one of the schedules {names}, but got "
        f"num_chunks={list(counts or ())}. Leave it out, or add 'interleaved' to the schedules."
    )
