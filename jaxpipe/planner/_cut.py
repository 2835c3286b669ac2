"""The cut of a model, with the costs of its layers where the partition method asks for them."""

import dataclasses
import logging
from collections.abc import Hashable, Sequence

from jax.sharding import Mesh

from jaxpipe.distributed import log
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import Profile, StageMemory, format_partition, profile_source
from jaxpipe.schedules import TickProgram

from ._calibrate import reference_hardware
from ._costs import Counted
from ._measure import measured_costs


def costs_for_cut(counted: Counted, mesh: Mesh) -> Profile:
    """Costs of layers that a cut goes by; all processes call.

    They are measured for `"profile"`, else counted: for the mesh's devices by name, or where these
    are not known for an accelerator, so that a model is cut alike on every machine. Raises
    PartitionError where the mesh's devices cannot be measured on.
    """
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
    """Cut a model by its partition method; only `"profile"` keeps to the limit in `memory`."""
    profile = dataclasses.replace(costs, memory=memory)
    return module.partition(trace, num_parts, profile=profile, signatures=signatures)


def stage_memory(program: TickProgram, bytes_per_param: float, limit: float | None) -> StageMemory:
    """What a program leaves to each part of a cut."""
    # Every device has a ring as long as the fullest stage needs, so a part needs no less where
    # fewer are in flight.
    in_flight, stages = -(-program.residual_slots // program.num_chunks), program.placement.stages
    return StageMemory(
        (in_flight,) * len(stages), stages, bytes_per_param, None if limit is None else round(limit)
    )


def log_cut(
    module: PipelineModule, trace: ModelTrace, profile: Profile, parts: Sequence[int]
) -> None:
    """Write the table of a cut."""
    table = format_partition(
        parts,
        [named.name for named in module.layers],
        trace.num_params(),
        stages=None if profile.memory is None else profile.memory.stages,
        profile=profile,
        ties=trace.ties(),
    )
    log(logging.INFO, "cut by partition_method=%r:\n%s", module.partition_method, table)
