"""A table of the parameters, operations and time of each layer of a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxpipe._util.text import format_table
from jaxpipe.config import FlopsProfilerSection
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.planner import named_hardware
from jaxpipe.layers import device_bytes
from jaxpipe.programs.jaxpr import num_flops, program_kernels

from ._recorded import Operation

_BACKWARD_PRODUCTS = 2
"""Products in a backward for each product in the forward: the input and weight gradients."""


@dataclass(frozen=True)
class LayerProfile:
    """The profile of a layer, or of the loss, in one step.

    Attributes:
        name: Its name.
        stage: The stage that runs it. None means all stages.
        num_params: Number of its parameters.
        forward_flops: FLOPs of matrix products in its forward, for one microbatch of one replica.
        flops: FLOPs of forward and backward in the whole step, on all replicas.
        busy_s: Seconds that a device of its stage spent on it in the step. None if not recorded.
            Layers at the same position in the virtual stages of one stage are one program; its time
            is divided evenly between them.
    """

    name: str
    stage: int | None
    num_params: int
    forward_flops: int
    flops: int
    busy_s: float | None


def model_flops(pipeline: Pipeline) -> int:
    """Count the FLOPs of a step, forward and backward on all replicas, without recompute."""
    return sum(layer.flops for layer in layer_profiles(pipeline))


def peak_flops(kind: str) -> float | None:
    """Peak FLOP/s for dense products in bfloat16 of a `jax.Device.device_kind`; None: not known."""
    hardware = named_hardware(kind)
    return None if hardware is None else hardware.flops_per_s


def layer_profiles(
    pipeline: Pipeline,
    operations: Sequence[Operation] = (),
    devices: Mapping[int, int] | None = None,
) -> list[LayerProfile]:
    """Count the work of each layer, then of the loss, and find their times in recorded operations.

    `devices` has the device of each stage, as its number in this process.
    """
    trace = pipeline.trace
    module = pipeline.module
    times = pipeline.batches.num_microbatches * pipeline.batches.num_replicas
    # The loss of vocabulary-parallel layers has collectives, and can be traced only inside the
    # executor.
    has_loss = module.loss_fn is not None and not pipeline.stage.ends.layers
    counted = {
        first: num_flops(program_kernels(trace.programs[first])) for first in set(trace.firsts)
    }
    parts = list(
        zip(
            pipeline.plan.parts,
            pipeline.plan.parts[1:],
            pipeline.plan.program.placement.stages,
            strict=False,
        )
    )
    busy_s = _busy_s(pipeline, operations, devices or {})
    found: list[LayerProfile] = []
    for index, named in enumerate(module.layers):
        on_all = index in pipeline.stage.ends.layers
        stage = (
            None if on_all else next(stage for start, stop, stage in parts if start <= index < stop)
        )
        forward = counted[trace.firsts[index]]
        num_params = trace.num_params()[index]
        flops = (1 + _BACKWARD_PRODUCTS) * forward * times
        found.append(
            LayerProfile(named.name, stage, num_params, forward, flops, busy_s.get(named.name))
        )
    if has_loss:
        forward = _loss_flops(pipeline)
        flops = (1 + _BACKWARD_PRODUCTS) * forward * times
        found.append(
            LayerProfile(
                "loss",
                pipeline.plan.program.placement.stages[-1],
                0,
                forward,
                flops,
                busy_s.get("loss"),
            )
        )
    return found


def _loss_flops(pipeline: Pipeline) -> int:
    def loss() -> int:
        traced = jax.make_jaxpr(lambda *args: pipeline.module.loss_terms(*args)[0])
        return num_flops(
            program_kernels(
                traced(pipeline.trace.boundaries[-1], pipeline.batches.microbatch.labels)
            )
        )

    return pipeline.trace.on_mesh(loss)


def format_profile(
    pipeline: Pipeline,
    layers: Sequence[LayerProfile],
    section: FlopsProfilerSection,
    step: int,
    step_s: float | None,
) -> str:
    """Format a profile as configured.

    Args:
        pipeline: The pipeline.
        layers: The result of `layer_profiles`.
        section: The configuration section.
        step: The step, counted from 1.
        step_s: Seconds that the step took. None if not recorded.

    Returns:
        The profile as lines of text.
    """
    total = sum(layer.flops for layer in layers)
    forward = sum(layer.forward_flops for layer in layers)
    device = pipeline.mesh.devices.flat[0]
    lines = [
        f"profile of step {step}: {pipeline.trace.total_params:,} parameters, "
        f"{_si(forward)}FLOP in the forward of a microbatch, {_si(total)}FLOP in a step on "
        f"{pipeline.mesh.size} devices"
    ]
    if step_s:
        reached = total / step_s / pipeline.mesh.size
        peak = peak_flops(device.device_kind)
        share = f", {reached / peak:.1%} of the peak" if peak else ""
        lines.append(
            f"the step took {step_s * 1e3:.4g} ms on the devices: {_si(reached)}FLOP/s a "
            f"device{share}"
        )
    if section.module_depth and section.top_modules:
        top = sorted(layers, key=lambda layer: -layer.flops)[: section.top_modules]
        lines.append(
            "most operations: "
            + ", ".join(f"{x.name} ({x.flops / max(total, 1):.1%})" for x in top)
        )
    if section.module_depth and section.detailed:
        heads = ("layer", "stage", "parameters", "FLOP, forward", "share", "time", "FLOP/s")
        rows = [heads, *(_row(pipeline, layer, total) for layer in layers)]
        lines += format_table(rows, "<")
    return "\n".join(lines)


def _row(pipeline: Pipeline, layer: LayerProfile, total: int) -> tuple[str, ...]:
    # A device computes one replica's share, divided further by any axes inside a stage.
    shares = (
        pipeline.mesh.size
        // pipeline.module.num_stages
        * (pipeline.module.num_stages if layer.stage is None else 1)
    )
    speed = f"{_si(layer.flops / shares / layer.busy_s)}FLOP/s" if layer.busy_s else "-"
    return (
        layer.name,
        "all" if layer.stage is None else str(layer.stage),
        f"{layer.num_params:,}",
        _si(layer.forward_flops),
        f"{layer.flops / max(total, 1):.1%}",
        "-" if layer.busy_s is None else f"{layer.busy_s * 1e3:.4g} ms",
        speed,
    )


def _busy_s(
    pipeline: Pipeline, operations: Sequence[Operation], devices: Mapping[int, int]
) -> dict[str, float]:
    """Return the seconds of each layer, and of the loss, on the device of its stage."""
    found: dict[str, float] = {}
    parts = list(
        zip(
            pipeline.plan.parts,
            pipeline.plan.parts[1:],
            pipeline.plan.program.placement.stages,
            strict=False,
        )
    )
    names = [named.name for named in pipeline.module.layers]
    everywhere = {names[i] for i in pipeline.stage.ends.layers}
    for stage, device in devices.items():
        own = {
            names[i] for start, stop, at in parts if at == stage for i in range(start, stop)
        } | everywhere
        for each in operations:
            if each.device != device:
                continue
            named = own & each.words
            if not named and each.phase == "loss":
                named = {"loss"}
            for name in named:
                found[name] = found.get(name, 0.0) + (each.end_s - each.start_s) / len(named)
    # Layers that all stages run have been summed over the stages.
    return {
        name: seconds / (len(devices) if name in everywhere else 1)
        for name, seconds in found.items()
    }


def _si(number: float) -> str:
    """Format a number with three significant digits and an SI prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(number) < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} E"


def memory_line(pipeline: Pipeline, compiled: jax.stages.Compiled) -> str:
    """Describe the contents of one device's memory in a step in one line."""
    struct = pipeline.states.struct
    sizes = {
        "parameters": struct.params,
        "optimiser state": struct.opt_state,
        "collections": struct.collections,
        "batch": pipeline.batches.struct,
    }
    parts = [f"{name} {_si(device_bytes(tree))}B" for name, tree in sizes.items()]
    analysis = compiled.memory_analysis()
    if analysis is not None:
        parts.append(f"temporaries of the step {_si(analysis.temp_size_in_bytes)}B")
    device = next(iter(pipeline.mesh.local_devices))
    stats = device.memory_stats() or {}
    used = [
        ("in use", "bytes_in_use"),
        ("at most so far", "peak_bytes_in_use"),
        ("limit", "bytes_limit"),
    ]
    parts += [f"{name} {_si(stats[key])}B" for name, key in used if key in stats]
    return f"memory of a device ({device.device_kind}): {', '.join(parts)}"
