"""The schedule objects of all stages, from any accepted form of a schedule."""

from collections.abc import Sequence
from itertools import islice

from jaxpipe.errors import ScheduleError

from ._base import PipeSchedule
from ._instructions import PipeInstruction
from ._resolve import resolve_schedule

AnySchedule = str | type[PipeSchedule] | PipeSchedule | Sequence[PipeSchedule]
"""A schedule: its name, its class, the object of one stage, or the objects of all stages."""


def stage_schedules(
    schedule: AnySchedule, num_microbatches: int | None = None, num_stages: int | None = None
) -> tuple[PipeSchedule, ...]:
    """Return the schedule object of every stage for one batch, stage 0 first."""
    if isinstance(schedule, PipeSchedule):
        schedules = _of_all_stages(type(schedule), schedule.micro_batches, schedule.stages)
    elif isinstance(schedule, (str, type)):
        kind = resolve_schedule(schedule)
        if num_microbatches is None or num_stages is None:
            raise ScheduleError(
                "A schedule class must come with its sizes, but got "
                f"num_microbatches={num_microbatches}, num_stages={num_stages}. Pass both, or pass "
                "the schedule object of every stage."
            )
        schedules = _of_all_stages(kind, num_microbatches, num_stages)
    else:
        schedules = tuple(schedule)
        if not schedules:
            raise ScheduleError(
                "A schedule must have at least one stage, but got stages=0. Pass one object per "
                "stage."
            )
    _require_alike(schedules, num_microbatches, num_stages)
    return schedules


def _of_all_stages(
    kind: type[PipeSchedule], num_microbatches: int, num_stages: int
) -> tuple[PipeSchedule, ...]:
    # The first object rejects sizes that are not numbers and converts the others.
    first = kind(num_microbatches, num_stages, 0)
    return (first, *(kind(num_microbatches, num_stages, stage) for stage in range(1, first.stages)))


def listed_steps(schedule: PipeSchedule) -> list[Sequence[PipeInstruction]]:
    """Return the steps of a schedule. Raises ScheduleError if they do not end."""
    units = schedule.micro_batches * schedule.num_chunks
    # A generous limit of eight steps for each unit on each stage: a longer schedule is endless.
    limit = 64 + 8 * (units + 1) * (schedule.stages + 1)
    listed = list(islice(schedule.steps(), limit + 1))
    if len(listed) > limit:
        raise ScheduleError(
            f"steps() must end, but got more than {limit} steps on stage={schedule.stage_id} with "
            f"micro_batches={schedule.micro_batches}, stages={schedule.stages}. Stop after the "
            "OptimizerStep."
        )
    return listed


def _require_alike(
    schedules: tuple[PipeSchedule, ...], num_microbatches: int | None, num_stages: int | None
) -> None:
    chunks = schedules[0].num_chunks
    if type(chunks) is not int or chunks < 1:
        raise ScheduleError(
            f"num_chunks must be at least 1, but got num_chunks={chunks!r}. Set it to 1 or more."
        )
    microbatches = schedules[0].micro_batches if num_microbatches is None else num_microbatches
    stages = len(schedules) if num_stages is None else num_stages
    for stage, one in enumerate(schedules):
        found = (one.micro_batches, one.stages, one.stage_id, one.num_chunks)
        wanted = (microbatches, stages, stage, chunks)
        for name, got, want in zip(
            ("micro_batches", "stages", "stage_id", "num_chunks"), found, wanted, strict=True
        ):
            if got != want:
                raise ScheduleError(
                    f"The schedules of one batch must agree, but got {name}={got} at index {stage} "
                    f"of {len(schedules)}. Build that one with {name}={want}."
                )
    if len(schedules) != stages:
        raise ScheduleError(
            f"There must be one schedule per stage, but got {len(schedules)} for stages={stages}. "
            f"Pass all {stages}."
        )
