"""The schedule `"auto"`: what a stage costs on these devices, and the schedule that follows."""

import dataclasses
import logging
import time
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import differentiable
from jaxpipe.config import PipelineConfig, unless_auto
from jaxpipe.distributed import log
from jaxpipe.errors import PartitionError
from jaxpipe.executor import waits_in_branches
from jaxpipe.layers import ModelTrace, PipelineModule, estimate_layers, layer_signatures
from jaxpipe.partition import Profile, is_method, tick_of
from jaxpipe.schedules import CHUNK_COUNTS, Choice, StageCosts, choose_schedule, resolve_schedule, schedule_names

from ._profile import agreed, profile_layers, runnable_devices

_TICKS = 64


def choose_settings(
    module: PipelineModule,
    trace: ModelTrace,
    mesh: Mesh,
    labels: PyTree,
    num_microbatches: int,
    section: PipelineConfig,
    param_size: float = 16.0,
) -> tuple[Choice, PipelineConfig]:
    """Choose schedule, chunks and whether idle actions are skipped, and log why; all processes call.

    Layers are timed on the mesh's devices, or their operations counted where nothing can be run on these. The
    arguments are those of `make_plan`, with its section of settings that has `schedule="auto"`, of which
    `num_chunks`, `max_pending_weights` and `skip_idle` stay as they are where they are set, and the bytes of a
    parameter, its gradient and the optimiser's numbers for it. Of a section that names a schedule with split backwards
    only `max_pending_weights` is chosen, by counted operations: the most that fits.

    Returns:
        The choice, and the settings that follow.

    Raises:
        PartitionError: The layers cannot be cut as asked, or not into as many chunks as are set.
        ScheduleError: The work takes no time.
        LayerError: A layer cannot be differentiated.
    """
    name = None if section.schedule == "auto" else str(section.schedule)
    runs = bool(runnable_devices(mesh)) and name is None
    profile = profile_layers(module, trace, mesh, labels, "times" if runs else "counts", split_backward=True)
    by = profile
    if is_method(module.partition_method, "best"):
        # As the cut itself is made, the same on every machine.
        signatures = layer_signatures(module.layers, trace, module.compute_dtype)
        by = estimate_layers(module, trace, labels, signatures)
    num_chunks = unless_auto(section.num_chunks)
    if name is not None:
        num_chunks = resolve_schedule(name, num_chunks).num_chunks
    cuts = _possible_cuts(module, trace, by, num_chunks)
    cut = cuts[min(cuts)]
    costs, num_params, recomputed_bytes = _largest_stage(profile, cut, module.num_stages)
    param_bytes = round(param_size * num_params)
    # Layers without any work give 0; that is refused below, with the costs.
    stage_s = costs.forward_s + costs.input_s + costs.weight_s or 1.0
    if runs:
        tick_s, branch_s = _overheads(mesh, trace.boundaries[cut[1]] if module.num_stages > 1 else ())
        weight_size = jnp.dtype(module.compute_dtype or jnp.float32).itemsize
        copy_s = weight_size * num_params * _seconds_per_byte(mesh) if max(cuts) > 1 else 0.0
        costs = dataclasses.replace(costs, tick_overhead_s=tick_s, branch_overhead_s=branch_s, copy_s=copy_s)
    limit, skip_idle = limit_of(section, mesh), unless_auto(section.skip_idle) if name is None else True
    # On CPU a branch costs next to nothing, and idle actions, where they are computed, all their time.
    if skip_idle is None and mesh.devices.flat[0].platform == "cpu":
        skip_idle = not waits_in_branches(mesh)
    choice = choose_schedule(
        costs,
        module.num_stages,
        num_microbatches,
        # What is left for residuals in flight and pending weight gradients, in which schedules differ.
        memory_limit_bytes=None if limit is None else max(limit - param_bytes - recomputed_bytes, 0),
        # What a stage cut into chunks takes, relative to the whole: in each tick all wait for the largest chunk.
        chunk_counts={count: count * tick_of(profile, cut).slowest_s / stage_s for count, cut in cuts.items()},
        max_pending=unless_auto(section.max_pending_weights),
        skip_idle=skip_idle,
        names=None if name is None else (name,),
    )
    best, level = choice.best, logging.INFO
    if limit is not None and (param_bytes > limit or not best.fits):
        level = logging.WARNING
        less = "." if param_bytes > limit else "; or recompute activations, or use smaller microbatches."
        reason = (
            f"{best.schedule}: Nothing fits; this holds the least. Parameters, gradients and optimiser state take "
            f"{param_bytes:,} of {limit:,} bytes. Use more stages, or raise pipeline.memory_limit_gb{less}"
        )
        choice = dataclasses.replace(choice, reason=reason)
    log(level, "schedule=%r, with layers %s:\n%s", section.schedule, profile.source, choice)
    section = dataclasses.replace(section, max_pending_weights="auto" if best.max_pending is None else best.max_pending)
    if name is not None:
        return choice, section
    return choice, dataclasses.replace(
        section, schedule=best.schedule, num_chunks=best.num_chunks, skip_idle=best.skip_idle
    )


def limits_pending(section: PipelineConfig) -> bool:
    """True if the pending weight gradients of a named schedule are to be as many as a given limit on memory allows."""
    kind = schedule_names().get(section.schedule) if isinstance(section.schedule, str) else None
    is_open = section.max_pending_weights == "auto" and section.memory_limit_gb != "auto"
    return is_open and kind is not None and kind.min_pending is not None


def limit_of(section: PipelineConfig, mesh: Mesh) -> int | None:
    """Bytes that training may hold on a device: those of the settings, or the device's; None where it tells none."""
    if section.memory_limit_gb != "auto":
        return round(section.memory_limit_gb * 1e9)
    devices = runnable_devices(mesh)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit") if devices else None
    return None if limit is None else agreed(limit, min)


def _possible_cuts(
    module: PipelineModule, trace: ModelTrace, profile: Profile, num_chunks: int | None
) -> dict[int, tuple[int, ...]]:
    """The cut for each number of chunks that the settings allow and the partition method can cut into."""
    method, num_stages = module.partition_method, module.num_stages
    if num_chunks is not None:
        counts: tuple[int, ...] = (num_chunks,)
    else:
        counts = CHUNK_COUNTS if isinstance(method, str) else (max(1, (len(method) - 1) // num_stages),)
    found: dict[int, tuple[int, ...]] = {}
    errors: list[PartitionError] = []
    for count in counts:
        try:
            found[count] = module.partition(trace, count * num_stages, profile=profile)
        except PartitionError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _largest_stage(profile: Profile, boundaries: tuple[int, ...], num_stages: int) -> tuple[StageCosts, int, int]:
    """Costs of the slowest stage, and the most that a stage holds whatever the schedule.

    This is the number of its parameters, and the bytes that a backward makes again, for one microbatch at a time. Where
    stages hold several parts, part p is taken to be on stage `p % num_stages`.
    """
    chunks = [profile.layers[first:end] for first, end in pairwise(boundaries)]
    stages = [[layer for chunk in chunks[s::num_stages] for layer in chunk] for s in range(num_stages)]
    slowest = max(stages, key=lambda layers: sum(layer.forward_s + layer.backward_s for layer in layers))
    weight_s = sum(layer.weight_s for layer in slowest)
    sizes = profile.part_sizes(boundaries)
    sums = [[sum(each) for each in zip(*sizes[s::num_stages], strict=True)] for s in range(num_stages)]
    costs = StageCosts(
        forward_s=sum(layer.forward_s for layer in slowest),
        input_s=sum(layer.backward_s for layer in slowest) - weight_s,
        weight_s=weight_s,
        activation_bytes=max(residual_bytes for _, residual_bytes, _ in sums),
        pending_bytes=max(sum(layer.pending_bytes for layer in layers) for layers in stages),
    )
    most = max(num_params for num_params, _, _ in sums) + profile.stage_sharded_params
    return costs, most, max(recomputed for _, _, recomputed in sizes)


def _seconds_per_byte(mesh: Mesh) -> float:
    """Seconds that a device takes to copy a byte within its memory, as process 0 measures them."""
    # Beyond the caches, and short beside the layers' own measuring.
    num_bytes = 1 << 26
    copy, value = jax.jit(jnp.copy), jnp.zeros(num_bytes, jnp.int8, device=runnable_devices(mesh)[0])
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(copy(value))
        seconds.append(time.perf_counter() - start)
    return agreed([min(seconds)])[0] / num_bytes


def _overheads(mesh: Mesh, activation: PyTree) -> tuple[float, float]:
    """Seconds that a tick takes beside its actions, and that a branch around one takes, as process 0 measures them."""
    num_stages = mesh.shape["stage"]
    pairs = [(s, (s + 1) % num_stages) for s in range(num_stages)]

    def ticks(tick: Callable[[jax.Array, PyTree], PyTree]) -> float:
        def run() -> PyTree:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), differentiable(activation))
            # The stage is added so that neighbours take the branch in turn, as idle stages beside busy ones do.
            start = jax.lax.axis_index("stage") + jnp.arange(_TICKS)
            carry, _ = jax.lax.scan(lambda c, t: (tick(t, c), None), zeros, start)
            return [jnp.sum(x)[None] for x in carry]  # else nothing would need the loop

        spec = P(mesh.axis_names)
        jitted = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))
        jax.block_until_ready(jitted())
        # As often on all processes, whatever they measure: each call waits for all of them. Other programs only add to
        # a time, so the least counts.
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(jitted())
            seconds.append(time.perf_counter() - start)
        return min(seconds) / _TICKS

    def compute(carry: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x + 1, carry)

    def send_twice(carry: PyTree) -> PyTree:
        # An activation and a gradient.
        return jax.tree.map(lambda x: jax.lax.ppermute(jax.lax.ppermute(x, "stage", pairs), "stage", pairs), carry)

    plain_s = ticks(lambda _, carry: send_twice(compute(carry)))
    branched_s = ticks(lambda tick, carry: send_twice(jax.lax.cond(tick % 2 == 0, compute, lambda c: c, carry)))
    # Measured, a loop with a branch may take less than one without, by noise.
    branch_s = max(branched_s - plain_s, 0.0)
    tick_s, branch_s = agreed([plain_s, branch_s])
    return tick_s, branch_s
