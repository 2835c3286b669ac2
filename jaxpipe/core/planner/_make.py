"""Make the plan of a pipeline from a model, its mesh and its configuration."""

import dataclasses
import logging
from collections.abc import Sequence

from jaxpipe.core.executor import PipelinePlan
from jaxpipe.distributed import log
from jaxpipe.schedules import lower_schedule
from jaxpipe.schedules.partition import profile_source

from ._calibrate import hardware_of, limit_of, reference_hardware
from ._choose import CLEAR_GAIN, SearchSpace, candidates, limits_pending, ranked, with_schedule
from ._cut import costs_for_cut, cut_parts, log_cut, stage_memory
from ._forecast import Forecast, candidate_table
from ._job import Job
from ._measure import measured_costs, runnable_devices
from ._notes import notes_on_cut
from ._plan import plan_cut, schedule_of


def make_plan(job: Job, parts: Sequence[int] | None = None) -> PipelinePlan:
    """Make all decisions that the configuration leaves open; all processes must call this function.

    The boundaries `parts`, for instance from another plan for the same model, are kept if given.
    """
    module = job.module
    mesh = job.mesh
    section = job.config.pipeline
    profile = costs = None
    notes = ()
    choice = ""
    signatures = job.counted.signatures
    is_given = parts is not None
    if section.schedule == "auto" or limits_pending(section):
        weighed = _weighed(job, parts)
        found = ranked(candidates(weighed, SearchSpace.of(section)))
        best = found[0]
        costs = weighed.cut_costs
        choice = _said(weighed, found)
        parts = best.boundaries
        section = with_schedule(section, best)
    schedule = schedule_of(section)
    num_parts = module.num_stages * schedule.num_chunks
    is_profiled = profile_source(module.partition_method) is not None
    if not is_given and (num_parts > 1 or is_profiled):
        costs = costs or costs_for_cut(job.counted, mesh)
        memory = None
        if is_profiled:
            program = lower_schedule(schedule, job.num_microbatches, module.num_stages)
            memory = stage_memory(program, job.bytes_per_param, limit_of(section, mesh))
            profile = dataclasses.replace(costs, memory=memory)
        if parts is None:
            parts = cut_parts(module, job.trace, costs, num_parts, signatures, memory)
        if profile is not None:
            log_cut(module, job.trace, profile, parts)
        notes = notes_on_cut(job, costs, parts) if num_parts > 1 else ()
    parts = (0, len(module.layers)) if parts is None else parts
    # A single virtual stage consists only of the trunk, so it does not matter which layers are
    # equal.
    signatures = signatures if num_parts > 1 else (None,) * len(module.layers)
    plan = plan_cut(job, section, signatures, parts)
    choice = choice if job.config.pipeline.schedule == "auto" else ""
    return dataclasses.replace(plan, profile=profile, choice=choice, notes=notes)


def _weighed(job: Job, parts: Sequence[int] | None) -> Job:
    """Return a job on the devices of its mesh, which may be absent; all processes must call this.

    Boundaries replace the partition method of its model, if given.
    """
    module = job.module if parts is None else job.module.replace(partition_method=tuple(parts))
    measured = None
    if profile_source(module.partition_method) == "times" and runnable_devices(job.mesh):
        costs = job.counted.costs(reference_hardware(job.mesh))
        measured = measured_costs(job.counted, job.mesh, costs)
    limit = limit_of(job.config.pipeline, job.mesh)
    return dataclasses.replace(
        job,
        module=module,
        hardware=hardware_of(job.mesh),
        limit_bytes=limit,
        measured=measured,
    )


def _said(job: Job, found: Sequence[Forecast]) -> str:
    """Return the candidates and the choice as a table, and log it."""
    best = found[0]
    limit = job.limit_bytes
    level = logging.INFO
    room = "" if limit is None else f" that fits {limit / 1e9:.3g} GB"
    reason = f"{best.schedule}: The simplest within {CLEAR_GAIN:.0%} of the shortest step{room}."
    if not best.fits:
        level = logging.WARNING
        memory = best.memory
        without_rings = memory.weights + memory.masters + memory.gradient_sums
        less = (
            "."
            if without_rings > (limit or 0)
            else "; or recompute activations, or use smaller microbatches."
        )
        reason = (
            f"{best.schedule}: Nothing fits; this holds the least. Parameters, gradients and "
            f"optimiser state take {without_rings:,.0f} of {limit:,.0f} bytes. Use more stages, or "
            f"raise pipeline.memory_limit_gb{less}"
        )
    table = "\n".join([*candidate_table(found), reason])
    log(
        level,
        "schedule=%r, with layers %s:\n%s",
        job.config.pipeline.schedule,
        job.costs.source,
        table,
    )
    return table
