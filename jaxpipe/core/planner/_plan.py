"""The plan of a pipeline, which follows from a schedule and a cut."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Literal

from jax.sharding import Mesh

from jaxpipe.config import PipelineConfig, unless_auto
from jaxpipe.core.executor import PipelinePlan, loops_idle, waits_in_branches
from jaxpipe.core.state import VocabLayers, find_vocab_layers
from jaxpipe.distributed.topology import FSDP, automatic_axes, mesh_shape, stages_cross_hosts
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import (
    IdlePolicy,
    PipeSchedule,
    TickProgram,
    lower_schedule,
    makespan,
    resolve_schedule,
    with_ends_apart,
    with_idle,
)
from jaxpipe.schedules.partition import cut_stages

from ._job import Job

_OVERLAP_COST = 1.02
"""How much longer a schedule may become when losses run one tick later.

This is less than the exchanges of the losses between hosts would take.
"""


def plan_cut(
    job: Job, section: PipelineConfig, signatures: Sequence[Hashable], parts: Sequence[int]
) -> PipelinePlan:
    """Make the decisions that follow from a schedule and a cut.

    Nothing is measured, and the mesh's devices may be absent. `section` is the section `pipeline`
    of the configuration with the chosen schedule.
    """
    module = job.module
    mesh = job.mesh
    config = job.config
    schedule = schedule_of(section)
    vocab, _ = find_vocab_layers(
        module.layers, job.trace, cut_stages(signatures, parts), module.num_stages
    )
    program = lower_training(schedule, job.num_microbatches, section, module, vocab, mesh)
    if section.skip_idle == "auto":
        section = dataclasses.replace(section, skip_idle=skips_idle(program, mesh))
    section = _with_gathers(section, config.zero_optimization.stage, mesh)
    skips = section.skip_idle is True
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    # Collectives block on CPU, so there only if the program for accelerators is requested.
    has_ends_apart = mesh_shape(mesh)["data"] > 1 and (
        not is_cpu or config.pipeline.skip_idle is False
    )
    if has_ends_apart:
        # The first tick then overlaps gathers of weights, and the last tick overlaps reductions of
        # gradients.
        program = with_ends_apart(program)
    # On accelerators exchanges overlap computation. On CPU a stage that skips its forward would
    # wait for others.
    sends_early = not (skips and (is_cpu or _waits_amid_ticks(program)))
    # All stages must take part in exchanges and in the sums of vocabulary-parallel layers.
    has_exchanges = sends_early or bool(vocab.layers)
    idle = IdlePolicy(
        skips=skips,
        loops=loops_idle(mesh) and not has_exchanges,
        masks_ends=has_ends_apart and config.pipeline.skip_idle == "auto",
        splits_first=bool(vocab.first),
        splits_last=bool(vocab.last),
    )
    config = dataclasses.replace(config, pipeline=section)
    program = with_idle(program, idle)
    return PipelinePlan(
        config, schedule, program, idle, tuple(signatures), tuple(parts), sends_early
    )


def schedule_of(section: PipelineConfig) -> type[PipeSchedule]:
    """Return the class of the named schedule, with its chunks and pending weight gradients."""
    return resolve_schedule(
        section.schedule, unless_auto(section.num_chunks), unless_auto(section.max_pending_weights)
    )


def _with_gathers(section: PipelineConfig, zero_stage: int, mesh: Mesh) -> PipelineConfig:
    """Return the section with `gather_weights` decided."""
    is_divided = FSDP in mesh.axis_names
    if section.gather_weights != "auto" and not is_divided:
        raise ConfigError(
            "pipeline.gather_weights must be set only where weights are divided over an axis "
            f"'fsdp', but got pipeline.gather_weights={section.gather_weights!r} for a mesh with "
            f"the axes {', '.join(map(repr, mesh.axis_names))}. Remove it, add the axis to the "
            "topology, or use zero_optimization.stage=2 or 3.",
            paths=["pipeline.gather_weights"],
        )
    if section.gather_weights == "auto" and is_divided:
        gather: Literal["step", "tick"] = "step" if zero_stage == 2 else "tick"
        section = dataclasses.replace(section, gather_weights=gather)
    return section


def lower_training(
    schedule: type[PipeSchedule],
    num_microbatches: int,
    section: PipelineConfig,
    module: PipelineModule,
    vocab: VocabLayers,
    mesh: Mesh,
) -> TickProgram:
    """Return the tick program of a schedule, losses a tick later if that pays or is set."""
    wanted = unless_auto(section.overlap_vocabulary)
    num_stages = module.num_stages
    if wanted and not vocab.last and num_stages > 1:
        raise ConfigError(
            "pipeline.overlap_vocabulary must be true only where the last layers are split over "
            "the stages, but got pipeline.overlap_vocabulary=True for last layer "
            f"{module.layers[-1].name}, which has no split parameter. Set "
            "pipeline.split_vocabulary too, use VocabHead, or leave it out.",
            paths=["pipeline.overlap_vocabulary"],
        )
    program = lower_schedule(schedule, num_microbatches, num_stages)
    # Inside a host products overlap the exchanges anyway, and a stage would keep one more
    # microbatch in flight without a gain.
    may_pay = mesh.devices.flat[0].platform != "cpu" and stages_cross_hosts(mesh)
    if not vocab.last or not (may_pay if wanted is None else wanted):
        return program
    later = lower_schedule(schedule, num_microbatches, num_stages, delays_loss=True)
    # Most schedules take the same time, because the added tick contains actions that other ticks
    # then lack. "zero-bubble-v" takes a third longer.
    times = [makespan(each, 1.0, 2.0) for each in (program, later)]
    return later if wanted or times[1] <= _OVERLAP_COST * times[0] else program


def skips_idle(program: TickProgram, mesh: Mesh) -> bool:
    """Return whether idle actions are branched around if the configuration leaves it open."""
    # On accelerators straight code overlaps exchanges better. If backwards are split, skipping pays
    # nevertheless: computing an idle action takes the time that splitting saves.
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    skips = is_cpu or program.has_split_backward or _has_cheap_branches(program, mesh)
    return skips and not waits_in_branches(mesh)


def _waits_amid_ticks(program: TickProgram) -> bool:
    """Return whether stages that skip idle actions would wait in an exchange for a forward."""
    # XLA (JAX 0.10) runs one exchange at a time. If activations are sent in both directions, a
    # stage has to wait for one of the two. A stage with only a backward would start it after its
    # neighbour's forward has ended, so that in most ticks of "zero-bubble-v" the two would run one
    # after the other.
    forward = program.tables.forward.chunk
    backward = program.tables.backward.chunk
    ticks = zip(zip(*forward, strict=True), zip(*backward, strict=True), strict=True)
    mixed = sum(
        any(f >= 0 > b for f, b in zip(*tick, strict=True))
        and any(b >= 0 > f for f, b in zip(*tick, strict=True))
        for tick in ticks
    )
    return 2 * mixed > program.num_ticks and any(
        len(run.activation_sends) > 1 for run in program.runs
    )


def _has_cheap_branches(program: TickProgram, mesh: Mesh) -> bool:
    """Return whether actions of several chunks should branch on the chunk instead of copying."""
    # Copying a chunk's weights takes 3 % of a tick of a 7B model on H200, a branch 0.1 %. But XLA
    # (JAX 0.10) runs one exchange at a time, overlapped by one branch, so schedules that send in
    # both directions need straight code. Collectives inside layers, along automatic axes, too.
    sends_one_way = all(len(run.activation_sends) <= 1 for run in program.runs)
    return program.num_chunks > 1 and sends_one_way and not automatic_axes(mesh)
