"""`plan`: the memory and step time of a training job, without its devices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxpipe._util.mesh import off_mesh
from jaxpipe._util.typing import PyTree
from jaxpipe.config import unless_auto
from jaxpipe.core.pipeline import ConfigLike
from jaxpipe.core.planner import (
    Forecast,
    Hardware,
    SearchSpace,
    auto_schedules,
    communicators,
    read_hardware,
)
from jaxpipe.distributed.topology import (
    FSDP,
    MANUAL_AXES,
    num_batch_shards,
)
from jaxpipe.errors import (
    ConfigError,
    JaxpipeError,
    shown,
)
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import resolve_schedule, schedule_names

from ._request import PlanRequest
from ._result import Alternative, StepPlan


@off_mesh
def plan(  # noqa: PLR0913  # one argument for each choice
    model: PipelineModule,
    config: ConfigLike,
    example_batch: Sequence[PyTree],
    hardware: str | tuple[Hardware, int] = "h200:8",
    *,
    optimizer: optax.GradientTransformation | None = None,
    axes: Mapping[str, int] | None = None,
    schedules: Sequence[str] | None = None,
    num_chunks: Sequence[int] | None = None,
    partition: Sequence[str | Sequence[int]] | None = None,
    recompute: Sequence[int] | None = None,
    measured_step_s: float | None = None,
    assume: str | Mapping[str, float] | None = None,
    memory_gb: float | None = None,
    alternatives: bool = True,
    compiles: bool = False,
    target_config: str | None = None,
) -> StepPlan:
    """Estimate the memory and step time of a training job without an accelerator.

    Nothing is allocated, and nothing is compiled unless you set `compiles`.

    The layers are traced, equal layers only once. Memory is counted by category. The time of each
    kernel comes from a roofline model of the named hardware: its arithmetic or its memory traffic,
    whichever takes longer. The schedule is then simulated tick by tick with these times.

    Args:
        model: The layers and their number of stages.
        config: DeepSpeed's configuration, as for `make_pipeline`.
        example_batch: One entry of the data iterator, `(inputs, labels)` or `(inputs, labels,
            side)`, as arrays or shapes. The leaves are `[microbatch_size * replicas, ...]`, or
            `[microbatch_size, ...]` for the samples of one replica.
        hardware: Name and number of devices, such as `"h200:64"`, with a name from
            `forecast.HARDWARE`, or a pair of a `Hardware` and a number.
        optimizer: An optax transformation. None: the optimiser of the configuration, or AdamW if
            the configuration names none.
        axes: Lengths of additional axes of the mesh, such as `{"model": 8}` or `{"fsdp": 8}`. The
            remaining devices are replicas.
        schedules: Names of schedules. None: the schedule of the configuration and all schedules
            that `"auto"` considers.
        num_chunks: Numbers of chunks. None: the number in the configuration, or 1, 2 and 4 if it is
            `"auto"`.
        partition: Partition methods or boundaries. None: the model's method and `"best"`.
        recompute: Layers per recomputed group, 0 for none. None: the number of the model or the
            configuration, or 0 and 1 if neither sets it.
        measured_step_s: Seconds of a measured step to compare with.
        assume: The share of the peaks that kernels reach: `"optimistic"`, `"fair"` or
            `"pessimistic"` (see `forecast.ASSUMED`), or values for fields of `Hardware`. None: the
            values of the hardware, which are `"optimistic"` for the named ones.
        memory_gb: GB (10^9 bytes) of a device's memory, if it differs from the named hardware's.
        alternatives: Whether to evaluate also other settings for the same batch on the same
            devices: a split vocabulary, ZeRO, an axis `model`, more or fewer stages.
        compiles: Whether to compile the program of the best candidate ahead of time, or of the
            smallest if none fits. This needs JAX's CUDA plugin or libtpu, but no device, and takes
            a minute or more.
        target_config: XLA's description of the GPU, a `GpuTargetConfigProto` as text. None: the
            description included in jaxpipe, which exists for H100, H200 and B200.

    Returns:
        All candidates. `str` formats them as tables; `to_json` and `to_html` write them.

    Raises:
        ConfigError: An argument or the configuration is wrong, or the hardware is unknown.
        TopologyError: The stages and axes do not divide the devices.
        DataError: The example does not fit the configuration.
        LayerError: Layers do not fit together or cannot be traced.
        PartitionError: None of the requested cuts exists.
        ScheduleError: A schedule is unknown, or none supports the requested number of chunks.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, jaxpipe
        >>> layers = [nn.Dense(64) for _ in range(8)]
        >>> model = jaxpipe.PipelineModule(layers, 4, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
        >>> x = jax.ShapeDtypeStruct((16, 64), jnp.float32)
        >>> config = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 16}
        >>> found = jaxpipe.plan(model, config, (x, x), "h200:8", schedules=["1f1b"], recompute=[0])
        >>> found.best.schedule, found.best.fits
        ('1f1b', True)
    """
    chosen_hardware, count = read_hardware(hardware)
    chosen_hardware = _changed(chosen_hardware, assume, memory_gb)
    if measured_step_s is not None and not 0 < measured_step_s < math.inf:
        raise ConfigError(
            "measured_step_s must be a positive number of seconds, but got "
            f"measured_step_s={measured_step_s!r}. Leave it out if there is no run to compare "
            "with."
        )
    if target_config is not None and not compiles:
        raise ConfigError(
            "target_config must be left out where nothing is compiled, but got "
            f"target_config={shown(target_config)}. Set compiles=True (--compile), or leave it "
            "out."
        )
    request = PlanRequest(
        model, config, example_batch, chosen_hardware, count, optimizer, axes or {}
    )
    space = _search_space(request, schedules, num_chunks, partition, recompute)
    found = request.forecasts(space)
    job = request.prepared.job
    listed = tuple(_alternatives(request, space, found)) if alternatives else ()
    advice = _advice(request, found, listed or _alternatives(request, space, found))
    step_plan = StepPlan(
        hardware=chosen_hardware,
        num_devices=count,
        axes={str(name): size for name, size in job.mesh.shape.items()},
        limit_bytes=request.limit_bytes,
        num_microbatches=request.prepared.job.num_microbatches,
        microbatch_size=job.microbatch_size,
        num_params=job.trace.total_params,
        candidates=tuple(found),
        best=found[0] if found[0].fits else None,
        alternatives=listed,
        advice=advice,
        assumptions=_assumptions(request),
        measured_step_s=measured_step_s,
    )
    if not compiles:
        return step_plan
    return dataclasses.replace(step_plan, compiled=request.compile(step_plan.shown, target_config))


def _changed(
    hardware: Hardware, assume: str | Mapping[str, float] | None, memory_gb: float | None
) -> Hardware:
    """Return the hardware with the user's assumptions."""
    if assume is not None:
        hardware = hardware.assuming(assume)
    if memory_gb is None:
        return hardware
    if not 0 < memory_gb < math.inf:
        raise ConfigError(
            f"memory_gb must be a positive number of GB, but got memory_gb={memory_gb!r}. Leave it "
            "out for the memory of the named hardware."
        )
    return hardware.assuming({"memory_bytes": memory_gb * 1e9})


def _search_space(
    request: PlanRequest,
    schedules: Sequence[str] | None,
    num_chunks: Sequence[int] | None,
    partition: Sequence[str | Sequence[int]] | None,
    recompute: Sequence[int] | None,
) -> SearchSpace:
    """Return the candidates that the user requests, or that the job leaves open."""
    module = request.prepared.job.module
    section = request.prepared.config.pipeline
    names = _listed("schedules", schedules)
    if names is None:
        names = list(auto_schedules())
        if section.schedule in schedule_names() and section.schedule not in names:
            names.append(section.schedule)
    for name in names:
        resolve_schedule(name)
    counts = _integers("num_chunks", num_chunks, 1)
    if counts is None and section.num_chunks != "auto":
        counts = (section.num_chunks,)
    methods = _listed("partition", partition)
    if methods is None:
        methods = list(dict.fromkeys([_hashable(module.partition_method), "best"]))
    groups = _integers("recompute", recompute, 0)
    if groups is None:
        given = module.activation_checkpoint_interval
        groups = (given,) if given else (0, 1)
    return SearchSpace(
        tuple(dict.fromkeys(names)),
        counts,
        unless_auto(section.max_pending_weights),
        tuple(map(_hashable, methods)),
        groups,
    )


def _hashable(method: Any) -> Any:
    return (
        method
        if isinstance(method, str)
        else tuple(method)
        if isinstance(method, Sequence)
        else method
    )


def _listed(name: str, values: Sequence[Any] | None) -> list[Any] | None:
    if values is None:
        return None
    # A single name would be read as a list of letters.
    if isinstance(values, str) or not values:
        raise ConfigError(
            f"{name} must be a list with at least one entry, but got {name}={shown(values)}. Write "
            "[...] around it, or leave it out."
        )
    return list(values)


def _integers(name: str, values: Sequence[int] | None, least: int) -> tuple[int, ...] | None:
    listed = _listed(name, values)
    if listed is None:
        return None
    if min(listed) < least:
        raise ConfigError(
            f"{name} must be integers of at least {least}, but got {name}={shown(values)} with "
            f"{min(listed)}. Correct or remove it."
        )
    return tuple(dict.fromkeys(listed))


def _advice(request: PlanRequest, found: Sequence[Forecast], others: Iterable[Alternative]) -> str:
    """Describe the candidates that do not fit, and the first change that makes one fit."""
    large = [one for one in found if not one.fits]
    if not large:
        return ""
    limit = request.limit_bytes
    job = request.prepared.job
    worst = max(large, key=lambda one: one.memory.total)
    begin = (
        f"{len(large)} of {len(found)} do not fit {limit / 1e9:.0f} GB; {worst.label} needs "
        f"{worst.memory.total / 1e9:.1f} GB"
    )
    fitting = [one for one in found if one.fits]
    if fitting:
        return f"{begin}. Use {fitting[0].label} ({fitting[0].memory.total / 1e9:.1f} GB)."
    least = min(large, key=lambda one: one.memory.total)
    begin = (
        f"Nothing fits {limit / 1e9:.0f} GB: {least.label} needs the least, "
        f"{least.memory.total / 1e9:.1f} GB"
    )
    for other in others:
        if other.forecast.fits:
            return (
                f"{begin}. Set {other.change}: {other.forecast.label} then needs "
                f"{other.forecast.memory.total / 1e9:.1f} GB."
            )
    without_rings = least.memory.weights + least.memory.masters + least.memory.gradient_sums
    factor = math.ceil(least.memory.total / limit)
    more = (
        f"Use about {factor * job.module.num_stages} stages on "
        f"{factor * job.mesh.devices.size} devices"
    )
    if without_rings <= limit and job.microbatch_size > 1:
        more = (
            "Use smaller microbatches (train_micro_batch_size_per_gpu below "
            f"{job.microbatch_size}), or {more[4:]}"
        )
    elif without_rings > limit:
        more += (
            f": weights, masters, moments and sums alone take {without_rings / 1e9:.1f} GB; or "
            "train adapters (jaxpipe.layers.lora), which need masters and moments for few of them"
        )
    return f"{begin}. {more}."


_MOST_INSIDE = 8
"""The largest axis `model` to try. Beyond it products become small and all-reduces long."""


@dataclasses.dataclass(frozen=True)
class _Change:
    """Another setting for the same batch on the same devices; `made` returns the job with it."""

    words: str
    made: Callable[[], PlanRequest]
    divides: bool = False


def _alternatives(
    request: PlanRequest, space: SearchSpace, found: Sequence[Forecast]
) -> Iterator[Alternative]:
    """Yield the best candidate of the job with each change, the cheapest change first."""
    least = min(one.memory.gradient_sums for one in found)
    wanted = space
    if 1 not in space.recompute and not any(one.fits for one in found):
        wanted = dataclasses.replace(space, recompute=(*space.recompute, 1))
    for change in _changes(request, recomputes=wanted is not space):
        try:
            best = change.made().forecasts(wanted)[0]
        except JaxpipeError:  # not possible with this model or mesh
            continue
        if not change.divides or best.memory.gradient_sums < least:
            yield Alternative(change.words, best)


def _changes(request: PlanRequest, *, recomputes: bool) -> Iterator[_Change]:
    """Yield changes of a job, the cheapest first; `recomputes` includes recompute."""
    config = request.prepared.config
    if config.pipeline.split_vocabulary is False:
        section = dataclasses.replace(config.pipeline, split_vocabulary="auto")
        made = functools.partial(_configured, request, pipeline=section)
        yield _Change("pipeline.split_vocabulary='auto'", made)
    if recomputes:
        words = "pipeline.activation_checkpoint_interval=1 (recompute each layer)"
        yield _Change(words, lambda: request)
    if num_batch_shards(request.prepared.job.mesh) > 1:
        for stage in range(config.zero_optimization.stage + 1, 4):
            zero = dataclasses.replace(config.zero_optimization, stage=stage)
            made = functools.partial(_configured, request, zero_optimization=zero)
            yield _Change(f"zero_optimization.stage={stage}", made)
    yield from _other_axes(request)


def _other_axes(request: PlanRequest) -> Iterator[_Change]:
    """Yield changes of the mesh, with as many samples per step."""
    mesh = request.prepared.job.mesh
    count = request.prepared.job.num_microbatches
    num_stages = request.model.num_stages
    # New axes and stages use devices of replicas, but not those of an axis that the user requested.
    free = num_batch_shards(mesh) // request.axes.get(FSDP, 1)
    inside = math.gcd(free, min(request.hardware.devices_per_host, _MOST_INSIDE))

    def made(count: int, **changes: Any) -> PlanRequest:
        changed = _configured(request, gradient_accumulation_steps=count)
        return dataclasses.replace(changed, **changes)

    def staged(count: int, num_stages: int) -> PlanRequest:
        # Explicit boundaries fit only the original number of stages.
        method = request.model.partition_method
        method = method if isinstance(method, str) else "best"
        return made(
            count, model=request.model.replace(num_stages=num_stages, partition_method=method)
        )

    if inside > 1 and set(mesh.shape) <= {*MANUAL_AXES, FSDP}:
        words = f"axes={{'model': {inside}}}, gradient_accumulation_steps={count * inside}"
        axes = {**request.axes, "model": inside}
        yield _Change(words, lambda: made(count * inside, axes=axes), divides=True)
    if num_stages % 2 == 0 and count % 2 == 0:
        words = f"num_stages={num_stages // 2}, gradient_accumulation_steps={count // 2}"
        yield _Change(words, lambda: staged(count // 2, num_stages // 2))
    if free % 2 == 0:
        words = f"num_stages={2 * num_stages}, gradient_accumulation_steps={2 * count}"
        yield _Change(words, lambda: staged(2 * count, 2 * num_stages))


def _configured(request: PlanRequest, **settings: Any) -> PlanRequest:
    """Return the request with other settings, and the entry of one replica, which fits any mesh."""
    prepared = request.prepared
    config = dataclasses.replace(prepared.config, **settings)
    return dataclasses.replace(request, config=config, example_batch=prepared.of_one)


def _beside(request: PlanRequest) -> str:
    """Describe the memory of the communicators."""
    found = communicators(request.prepared.job.mesh)
    each = request.hardware.communicator_bytes
    if not found or not each or request.prepared.job.config.pipeline.memory_limit_gb != "auto":
        return ""
    return (
        f", less {each / 1e9:.1f} GB for each communicator of NCCL, of {', '.join(found)}: an "
        "estimate, 0.5 to 1.8 GB have been seen"
    )


def _assumptions(request: PlanRequest) -> tuple[str, ...]:
    hardware = request.hardware
    found = [
        f"{hardware.name}: {hardware.flops_per_s / 1e12:.0f} TFLOP/s of bfloat16 products, of "
        f"which products reach {hardware.gemm_share:.0%} and attention "
        f"{hardware.attention_share:.0%}; {hardware.bytes_per_s / 1e12:.2f} TB/s, of which "
        f"{hardware.traffic_share:.0%} are reached; {hardware.wire_bytes_per_s / 1e9:.0f} GB/s in "
        f"a host of {hardware.devices_per_host}, of which {hardware.wire_share:.0%}, and "
        f"{hardware.network_bytes_per_s / 1e9:.0f} GB/s between hosts",
        "all devices run one program, so every stage needs the memory that is shown",
        "devices of one host are neighbours in the mesh; a stage waits for the stages it exchanges "
        "with",
        "jaxpipe.attention runs as one fused kernel; other attention writes its scores to memory "
        "and reads them again",
        f"programs may take {hardware.usable_share:.0%} of the memory, which "
        "XLA_PYTHON_CLIENT_MEM_FRACTION must allow" + _beside(request),
        "temporaries are an estimate: residuals of one chunk, gradients off the trunk, and the "
        "larger of logits and a backward's values",
        "collectives inside a stage overlap no computation",
        "MFU counts three times the operations of the forward, and of attention the part that its "
        "mask leaves; MFU whole counts the full square of scores, as most published figures do",
    ]
    if request.prepared.job.split_note:
        found.append(request.prepared.job.split_note)
    if request.optimizer is None and request.prepared.config.optimizer is None:
        found.append(
            "the optimiser is AdamW, because neither the call nor the configuration names one"
        )
    if request.prepared.job.mesh.shape.get("fsdp", 1) > 1:
        found.append(
            "gathers of weights over fsdp overlap matrix products, as far as these take as long"
        )
    if request.prepared.job.config.pipeline.offload_activations:
        found.append(
            "residuals are in host memory, and computation hides their copies completely, whatever "
            "their size"
        )
    return tuple(found)
