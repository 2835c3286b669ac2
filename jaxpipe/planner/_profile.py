"""Costs of a model's layers, measured on a device or counted, the same on all processes; and the cut by them."""

import dataclasses
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.distributed import gather_texts, log, run_on_all
from jaxpipe.errors import PartitionError
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import LayerCost, Profile, StageMemory, format_partition, profile_source

from ._costs import layer_costs
from ._flops import count_work

_ROUND_S = 0.01
"""Seconds for which a layer is called again and again, so that starting it counts for little."""


def cut_module(
    module: PipelineModule,
    trace: ModelTrace,
    mesh: Mesh,
    *,
    num_parts: int | None = None,
    stages: Sequence[int] | None = None,
    labels: PyTree = None,
    memory: StageMemory | None = None,
) -> tuple[tuple[int, ...], Profile | None]:
    """Cut a model by its partition method, with the costs of its layers where the method asks for them.

    For `"profile"` process 0 measures on its first device of the mesh and tells the others; all processes call. The
    table of the cut is logged.

    Args:
        module: The model.
        trace: Its shapes, for one microbatch of one replica.
        mesh: The devices.
        num_parts: As for `PipelineModule.partition`.
        stages: The stage that holds each part, for the table; None: part p is on stage `p % num_stages`.
        labels: A microbatch's labels, or their shapes, for the loss; None leaves it out.
        memory: What is known of memory, and its limit; only `"profile"` keeps to it.

    Returns:
        `(boundaries, profile)`; the profile is None for methods that need none.

    Raises:
        PartitionError: The method cannot cut these layers, or the mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """
    source = profile_source(module.partition_method)
    if source is None:
        return module.partition(trace, num_parts), None
    profile = dataclasses.replace(profile_layers(module, trace, mesh, labels, source), memory=memory)
    parts = module.partition(trace, num_parts, profile=profile)
    names = [named.name for named in module.layers]
    table = format_partition(parts, names, trace.num_params(), stages=stages, profile=profile, ties=trace.ties())
    log(logging.INFO, "cut by partition_method=%r:\n%s", module.partition_method, table)
    return parts, profile


def profile_layers(
    module: PipelineModule, trace: ModelTrace, mesh: Mesh, labels: PyTree, source: str, *, split_backward: bool = False
) -> Profile:
    """The costs of a model's layers; all processes call.

    Args:
        module: The model.
        trace: Its shapes, for one microbatch of one replica.
        mesh: The devices.
        labels: A microbatch's labels, or their shapes, for the loss; None leaves it out.
        source: `times` or `counts`.
        split_backward: As for `layer_costs`.

    Returns:
        The costs; see `layer_costs`.

    Raises:
        PartitionError: The mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """
    if source == "counts":
        return estimate_layers(module, trace, labels=labels, split_backward=split_backward)

    def measured() -> Profile:
        return measure_layers(module, trace, labels=labels, device=_device(mesh), split_backward=split_backward)

    # Times differ from process to process, and all must cut alike: those of process 0 count.
    profile = run_on_all(measured, who=[0])
    if jax.process_count() == 1 and profile is not None:
        return profile
    return profile_of_text(gather_texts("" if profile is None else text_of_profile(profile))[0])


def estimate_layers(
    module: PipelineModule,
    trace: ModelTrace,
    *,
    labels: PyTree = None,
    flops_per_s: float = 1e14,
    bytes_per_s: float = 1e12,
    split_backward: bool = False,
) -> Profile:
    """Estimate forward and backward of each distinct layer, for one microbatch, without running anything.

    The time is `flops / flops_per_s + moved_bytes / bytes_per_s`, the same on every machine. Operations are counted
    in the trace, not by XLA: its cost analysis counts the body of a scan once, however often it runs, and gives
    nothing for a program that is compiled for absent GPUs.

    Args:
        module: The model; what it recomputes counts with the backward.
        trace: Its shapes, for one microbatch of one replica.
        labels: As for `layer_costs`.
        flops_per_s: Operations per second that are assumed.
        bytes_per_s: Bytes per second that are assumed. For where layers are cut only the ratio of the two rates
            counts.
        split_backward: As for `layer_costs`.

    Returns:
        The costs.

    Raises:
        LayerError: A layer cannot be differentiated.
    """

    def seconds(function: Callable[..., Any], *structs: PyTree) -> float:
        work = count_work(function, *structs)
        return work.flops / flops_per_s + work.moved_bytes / bytes_per_s

    costs = layer_costs(module, trace, labels, seconds, split_backward=split_backward)
    source = f"estimated, {flops_per_s:.3g} FLOP/s and {bytes_per_s:.3g} B/s"
    return Profile(costs, source, module.activation_checkpoint_interval)


def measure_layers(
    module: PipelineModule,
    trace: ModelTrace,
    *,
    labels: PyTree = None,
    device: Any = None,
    rounds: int = 5,
    split_backward: bool = False,
) -> Profile:
    """Time the forward and the backward of each distinct layer, for one microbatch.

    Layers of equal traces, constants and shapes are timed once. Each function is compiled by itself, called to warm
    up, and called again in rounds, each waited for; the median round counts. Arguments are small positive numbers,
    integers are 0. A layer that is shorter than it takes to start a program counts as long as that takes. Layers that
    are sharded over a `model` axis are computed for all its devices at once and count for their share, without their
    exchanges.

    Args:
        module: The model; what it recomputes counts with the backward.
        trace: Its shapes, for one microbatch of one replica.
        labels: As for `layer_costs`.
        device: Where to run; None: this process's first device.
        rounds: Rounds to take the median of.
        split_backward: As for `layer_costs`.

    Returns:
        The costs.

    Raises:
        LayerError: A layer cannot be differentiated.
    """
    device = jax.local_devices()[0] if device is None else device

    def seconds(function: Callable[..., Any], *structs: PyTree) -> float:
        return _median_s(jax.jit(function), _filled(structs), rounds)

    with jax.default_device(device):
        costs = layer_costs(module, trace, labels, seconds, split_backward=split_backward)
    return Profile(costs, f"measured on {device.device_kind}", module.activation_checkpoint_interval)


def _filled(struct: PyTree) -> PyTree:
    """Arrays of these shapes: random numbers below 0.1, integers 0, flags set."""
    leaves, treedef = jax.tree.flatten(struct)

    def one(key: jax.Array, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.random.uniform(key, leaf.shape, maxval=0.1).astype(leaf.dtype)
        return jnp.full(leaf.shape, leaf.dtype == jnp.bool_, leaf.dtype)

    def fill() -> list[jax.Array]:
        return [one(jax.random.fold_in(jax.random.key(0), i), leaf) for i, leaf in enumerate(leaves)]

    return jax.tree.unflatten(treedef, jax.jit(fill)())


def _median_s(function: Callable[..., Any], args: tuple[Any, ...], rounds: int) -> float:
    """Seconds of a call; the first one compiles and is not counted."""
    jax.block_until_ready(function(*args))

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls - 1):
            function(*args)
        jax.block_until_ready(function(*args))
        return (time.perf_counter() - start) / calls

    calls = math.ceil(_ROUND_S / max(seconds(1), _ROUND_S / 100))
    return statistics.median(seconds(calls) for _ in range(rounds))


def text_of_profile(profile: Profile) -> str:
    """A profile as JSON, numbers exact; what is known of memory is left out."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(profile, memory=None)))


def profile_of_text(text: str) -> Profile:
    """The profile that `text_of_profile` wrote."""
    fields = json.loads(text)
    layers = tuple(LayerCost(**cost) for cost in fields["layers"])
    return Profile(layers, fields["source"], fields["interval"])


def can_measure(mesh: Mesh) -> bool:
    """True if programs can be run on the devices of a mesh, and not only be compiled for them."""
    return bool(_usable(mesh))


def _device(mesh: Mesh) -> Any:
    """The mesh's first device that this process can run on."""
    usable = _usable(mesh)
    if not usable:
        kind = mesh.devices.flat[0].device_kind
        raise PartitionError(
            f"partition_method='profile' must measure on a device of process 0, but got a mesh of {kind} devices that "
            "process 0 cannot run on. Use 'profile:flops', or explicit boundaries."
        )
    return usable[0]


def _usable(mesh: Mesh) -> list[Any]:
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device for device in own if device in device.client.local_devices()]
