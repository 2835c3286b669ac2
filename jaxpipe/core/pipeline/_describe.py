"""A pipeline as text, to print before training."""

from jaxpipe._util.text import format_bytes
from jaxpipe.distributed.topology import FSDP
from jaxpipe.errors import counted
from jaxpipe.layers import device_bytes
from jaxpipe.schedules import describe_idle, format_grid
from jaxpipe.schedules.partition import format_partition

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
    plan = pipeline.plan
    program = plan.program
    batches = pipeline.batches
    ends = pipeline.stage.ends.layers
    names = [named.name for named in pipeline.module.layers]
    stages = pipeline.module.num_stages
    others = [
        (name, size) for name, size in pipeline.mesh.shape.items() if name not in ("stage", "data")
    ]
    ranks = "".join(f" x {counted(size, f'{name} rank')}" for name, size in others)
    on_device, on_host = pipeline.sizes.residual_bytes
    hosted = f" on the device, {format_bytes(on_host)} in host memory" if on_host else ""
    lines = [
        format_partition(
            plan.parts,
            names,
            pipeline.trace.num_params(),
            stages=program.placement.stages if program.num_chunks > 1 else None,
            profile=plan.profile,
            ties=pipeline.trace.ties(),
        ),
        *plan.notes,
        *(["", plan.choice] if plan.choice else []),
        "",
        f"{program.name}: {counted(batches.num_microbatches, 'microbatch', 'es')} of "
        f"{counted(batches.microbatch_size, 'sample')} on {counted(stages, 'stage')} x "
        f"{counted(batches.num_replicas, 'replica')}{ranks}, at most {program.peak_in_flight} in "
        "flight",
        format_grid(
            plan.schedule, batches.num_microbatches, stages, max_width=max_width, max_rows=8
        ),
        describe_idle(program),
        "",
        f"trunk of every stage: {counted(len(pipeline.stage.cuts[0].trunk), 'layer')}; parameters "
        f"per device: {format_bytes(device_bytes(pipeline.states.struct.params))}",
        f"residuals of each microbatch: {format_bytes(on_device)}{hosted}; slots: "
        f"{program.residual_slots}",
        *_fsdp_lines(pipeline),
    ]
    if ends:
        later = "; the loss runs a tick after its forward" if program.delays_loss else ""
        lines.append(
            f"vocabulary-parallel, on all stages: {', '.join(names[i] for i in ends)}{later}"
        )
    return "\n".join(lines)


def _fsdp_lines(pipeline: Pipeline) -> list[str]:
    """Describe when weights are gathered, if they are divided over `fsdp`."""
    fsdp = pipeline.mesh.shape.get(FSDP, 1)
    if fsdp == 1:
        return []
    gathered = format_bytes(pipeline.sizes.gathered_bytes)
    gathers = pipeline.plan.config.pipeline.gather_weights
    when = {
        "step": "gathered once a step, and held to its end",
        "tick": "gathered by every forward and every backward, and held meanwhile",
    }[gathers]
    reduced = "as many of gradients are reduced by every backward"
    if gathers == "step":
        more = format_bytes(pipeline.sizes.whole_sums_bytes)
        reduced += (
            " (once a step over 'data' with zero_optimization.stage=1, whose sums take at "
            f"least {more} more)"
        )
    return [f"weights divided over fsdp={fsdp}: {gathered} are {when}; {reduced}"]
