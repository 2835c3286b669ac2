"""The cut of a model, with the costs of its layers if the partition method needs them."""

import dataclasses
import logging
from collections.abc import Hashable, Sequence

from jax.sharding import Mesh

from jaxpipe.distributed import log
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.schedules import TickProgram
from jaxpipe.schedules.partition import Profile, StageMemory, format_partition, profile_source

from ._calibrate import reference_hardware
from ._costs import Counted
from ._measure import measured_costs


def costs_for_cut(counted: Counted, mesh: Mesh) -> Profile:
    """Return the costs of layers on which a cut is based; all processes must call this function."""
    # Unknown devices are counted for a default accelerator, so that a model is cut in the same way
    # on every machine.
    source = profile_source(counted.module.partition_method)
    costs = counted.costs(reference_hardware(mesh), whole=source is not None)
    return measured_costs(counted, mesh, costs) if source == "times" else costs


def cut_parts(
    module: PipelineModule,
    trace: ModelTrace,
    costs: Profile,
    num_parts: int,
    signatures: Sequence[Hashable],
    memory: StageMemory | None = None,
) -> tuple[int, ...]:
    """Cut a model by its partition method; `memory` is that of its parts, for `"profile"`."""
    profile = dataclasses.replace(costs, memory=memory)
    return module.partition(trace, num_parts, profile=profile, signatures=signatures)


def stage_memory(program: TickProgram, bytes_per_param: float, limit: float | None) -> StageMemory:
    """Return the memory of each virtual stage of a cut that a program leaves."""
    # The ring buffer of every device is as long as the fullest stage needs, so a stage with fewer
    # microbatches in flight needs no less.
    in_flight = -(-program.residual_slots // program.num_chunks)
    stages = program.placement.stages
    return StageMemory(
        (in_flight,) * len(stages), stages, bytes_per_param, None if limit is None else round(limit)
    )


def log_cut(
    module: PipelineModule, trace: ModelTrace, profile: Profile, parts: Sequence[int]
) -> None:
    """Log the table of a cut."""
    table = format_partition(
        parts,
        [named.name for named in module.layers],
        trace.num_params(),
        stages=None if profile.memory is None else profile.memory.stages,
        profile=profile,
        ties=trace.ties(),
    )
    log(logging.INFO, "cut by partition_method=%r:\n%s", module.partition_method, table)
