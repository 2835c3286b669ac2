"""A pipeline as text, to print before training."""

from jaxpipe._text import format_bytes
from jaxpipe.errors import counted
from jaxpipe.layers import device_bytes
from jaxpipe.partition import format_partition
from jaxpipe.schedules import describe_idle, format_grid
from jaxpipe.topology import FSDP

from ._pipeline import Pipeline


def describe_pipeline(pipeline: Pipeline, max_width: int = 120) -> str:
    """Describe how a model is divided, what runs when, and how the step is compiled.

    Args:
        pipeline: The pipeline.
        max_width: Maximum number of characters in a line of the schedule.

    Returns:
        The partition as a table, the schedule as a grid of stages and steps, and further lines
        about memory and communication.
    """
    layers = pipeline.module.layers
    names = [named.name for named in layers]
    stages = pipeline.module.num_stages
    replicas = pipeline.num_replicas
    others = [
        (name, size) for name, size in pipeline.mesh.shape.items() if name not in ("stage", "data")
    ]
    ranks = "".join(f" x {counted(size, f'{name} rank')}" for name, size in others)
    on_device, on_host = pipeline.residual_bytes
    hosted = f" on the device, {format_bytes(on_host)} in host memory" if on_host else ""
    lines = [
        format_partition(
            pipeline.parts,
            names,
            pipeline.trace.num_params(),
            stages=pipeline.part_stages if pipeline.program.num_chunks > 1 else None,
            profile=pipeline.plan.profile,
            ties=pipeline.trace.ties(),
        ),
        *pipeline.plan.notes,
        *(["", pipeline.plan.choice] if pipeline.plan.choice else []),
        "",
        f"{pipeline.program.name}: {counted(pipeline.num_microbatches, 'microbatch', 'es')} of "
        f"{counted(pipeline.microbatch_size, 'sample')} on {counted(stages, 'stage')} x "
        f"{counted(replicas, 'replica')}{ranks}, at most {pipeline.program.peak_in_flight} in "
        "flight",
        format_grid(
            pipeline.schedule, pipeline.num_microbatches, stages, max_width=max_width, max_rows=8
        ),
        describe_idle(pipeline.program),
        "",
        f"trunk of every stage: {counted(len(pipeline.cuts[0].trunk), 'layer')}; parameters per "
        f"device: {format_bytes(device_bytes(pipeline.state_struct.params))}",
        f"residuals of each microbatch: {format_bytes(on_device)}{hosted}; slots: "
        f"{pipeline.program.residual_slots}",
    ]
    fsdp = pipeline.mesh.shape.get(FSDP, 1)
    gathered = format_bytes(pipeline.gathered_bytes)
    if fsdp > 1:
        when = {
            "step": "gathered once a step, and held to its end",
            "tick": "gathered by every forward and every backward, and held meanwhile",
        }[pipeline.config.pipeline.gather_weights]
        reduced = "as many of gradients are reduced by every backward"
        if pipeline.config.pipeline.gather_weights == "step":
            more = format_bytes(pipeline.whole_sums_bytes)
            reduced += (
                " (once a step over 'data' with zero_optimization.stage=1, whose sums take at "
                f"least {more} more)"
            )
        lines.append(f"weights divided over fsdp={fsdp}: {gathered} are {when}; {reduced}")
    if pipeline.ends.layers:
        later = "; the loss runs a tick after its forward" if pipeline.program.delays_loss else ""
        lines.append(
            "vocabulary-parallel, on all stages: "
            f"{', '.join(names[i] for i in pipeline.ends.layers)}{later}"
        )
    return "\n".join(lines)
