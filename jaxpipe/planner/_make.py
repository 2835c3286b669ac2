"""Make the plan of a pipeline from a model, its mesh and its configuration."""

import dataclasses
import logging
from collections.abc import Sequence

import optax

from jaxpipe.distributed import log
from jaxpipe.executor import Plan
from jaxpipe.layers import PipelineModule
from jaxpipe.partition import profile_source
from jaxpipe.schedules import lower_schedule

from ._calibrate import hardware_of, limit_of, reference_hardware
from ._candidate import Job
from ._choose import CLEAR_GAIN, Asked, candidates, limits_pending, ranked
from ._cut import costs_for_cut, cut_parts, log_cut, stage_memory
from ._forecast import Forecast, candidate_table
from ._measure import measured_costs, runnable_devices
from ._memory import bytes_per_param
from ._notes import notes_on_cut
from ._plan import plan_cut, schedule_of
from ._traced import Traced


def make_plan(
    traced: Traced,
    num_microbatches: int,
    optimizer: optax.GradientTransformation | None = None,
    parts: Sequence[int] | None = None,
) -> Plan:
    """Make all decisions that the configuration leaves open; all processes must call this function.

    Without an `optimizer`, the memory of Adam is assumed. The boundaries `parts`, for instance from
    another plan for the same model, are kept if given.
    """
    module = traced.module
    trace = traced.trace
    mesh = traced.mesh
    config = traced.config
    section = config.pipeline
    profile = None
    notes = ()
    choice = ""
    optimizer = optax.adam(1e-3) if optimizer is None else optimizer
    signatures = traced.counted.signatures
    is_given = parts is not None
    costs = None
    if section.schedule == "auto" or limits_pending(section):
        cut = module.replace(partition_method=tuple(parts)) if parts is not None else module
        job = _job(traced, cut, num_microbatches, optimizer)
        found = ranked(candidates(job, Asked.of(section)))
        best = found[0]
        costs = job.cut_costs
        choice = _said(job, found)
        parts = best.boundaries
        section = dataclasses.replace(
            section,
            schedule=best.schedule,
            num_chunks=best.num_chunks,
            max_pending_weights="auto" if best.max_pending is None else best.max_pending,
        )
    schedule = schedule_of(section)
    is_cut = module.num_stages * schedule.num_chunks > 1
    is_profiled = profile_source(module.partition_method) is not None
    if not is_given and (is_cut or is_profiled):
        costs = costs or costs_for_cut(traced.counted, mesh)
        memory = None
        if is_profiled:
            program = lower_schedule(schedule, num_microbatches, module.num_stages)
            memory = stage_memory(
                program, bytes_per_param(module, trace, config, optimizer), limit_of(section, mesh)
            )
            profile = dataclasses.replace(costs, memory=memory)
        if parts is None:
            parts = cut_parts(
                module, trace, costs, module.num_stages * schedule.num_chunks, signatures, memory
            )
        if profile is not None:
            log_cut(module, trace, profile, parts)
        notes = notes_on_cut(module, trace, costs, parts, traced.split_note) if is_cut else ()
    parts = (0, len(module.layers)) if parts is None else parts
    # A single virtual stage consists only of the trunk, so it does not matter which layers are
    # equal.
    signatures = signatures if is_cut else (None,) * len(module.layers)
    plan = plan_cut(module, trace, mesh, num_microbatches, config, section, signatures, parts)
    choice = choice if config.pipeline.schedule == "auto" else ""
    return dataclasses.replace(plan, profile=profile, choice=choice, notes=notes)


def _job(
    traced: Traced,
    module: PipelineModule,
    num_microbatches: int,
    optimizer: optax.GradientTransformation,
) -> Job:
    """Return a job on the devices of a mesh, which may be absent; all processes must call this."""
    trace = traced.trace
    mesh = traced.mesh
    config = traced.config
    counted = traced.counted
    measured = None
    if profile_source(module.partition_method) == "times" and runnable_devices(mesh):
        measured = measured_costs(counted, mesh, counted.costs(reference_hardware(mesh)))
    limit = limit_of(config.pipeline, mesh)
    return Job(
        module,
        trace,
        mesh,
        counted,
        num_microbatches,
        config,
        optimizer,
        hardware_of(mesh),
        limit,
        measured,
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
