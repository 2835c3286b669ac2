"""Costs of a model's layers, measured on a device or counted, the same on all processes; and the cut by them."""

import dataclasses
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.distributed import gather_texts, log, run_on_all
from jaxpipe.errors import PartitionError
from jaxpipe.jaxpr import count_kernels
from jaxpipe.layers import ESTIMATED, ModelTrace, PipelineModule, estimate_layers, estimated_s
from jaxpipe.partition import LayerCost, Profile, StageMemory, format_partition, is_method, profile_source

from ._costs import Seconds, layer_costs

_ROUND_S = 0.01
"""Seconds for which a layer is called again and again, so that starting it counts for little."""


def cut_module(
    module: PipelineModule,
    trace: ModelTrace,
    mesh: Mesh,
    *,
    stages: Sequence[int] | None = None,
    labels: PyTree = None,
    memory: StageMemory | None = None,
    signatures: Sequence[Hashable] | None = None,
) -> tuple[tuple[int, ...], Profile | None]:
    """Cut a model by its partition method, with the costs of its layers where the method asks for them.

    All processes call. The table of the cut is logged where costs are known.

    `stages` is the stage of each part, by default one part on each stage in order. Without `labels` the loss is left
    out. Only `"profile"` keeps to the limit in `memory`.

    Returns:
        `(boundaries, profile)`; the profile is None for methods that need none.

    Raises:
        PartitionError: The method cannot cut these layers, or the mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """
    num_parts = None if stages is None else len(stages)
    source = profile_source(module.partition_method)
    if source is None:
        estimate = None
        if is_method(module.partition_method, "best") and signatures is not None:
            estimate = estimate_layers(module, trace, labels, signatures)
        return module.partition(trace, num_parts, profile=estimate, signatures=signatures), None
    profile = dataclasses.replace(profile_layers(module, trace, mesh, labels, source), memory=memory)
    parts = module.partition(trace, num_parts, profile=profile)
    names = [named.name for named in module.layers]
    table = format_partition(parts, names, trace.num_params(), stages=stages, profile=profile, ties=trace.ties())
    log(logging.INFO, "cut by partition_method=%r:\n%s", module.partition_method, table)
    return parts, profile


def profile_layers(
    module: PipelineModule,
    trace: ModelTrace,
    mesh: Mesh,
    labels: PyTree,
    source: Literal["times", "counts"],
    *,
    split_backward: bool = False,
) -> Profile:
    """Costs of a model's layers as `layer_costs` gives them, the same on all processes, which all call.

    Of the sources, `times` are measured by process 0 on its first device of the mesh; `counts` are estimated from
    operations and bytes, without running anything.

    Raises:
        PartitionError: The mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """

    def costs(seconds: Seconds, source: str) -> Profile:
        layers = layer_costs(module, trace, labels, seconds, split_backward=split_backward)
        return Profile(layers, source, module.activation_checkpoint_interval)

    def measured() -> Profile:
        devices = runnable_devices(mesh)
        if not devices:
            raise PartitionError(
                "partition_method='profile' must measure on a device of process 0, but got a mesh of "
                f"{mesh.devices.flat[0].device_kind} devices that process 0 cannot run on. Use 'profile:flops', or "
                "explicit boundaries."
            )
        with jax.default_device(devices[0]):
            return costs(measured_s, f"measured on {devices[0].device_kind}")

    if source == "counts":
        return costs(counted_s, ESTIMATED)
    # Times differ from process to process, and all must cut alike: those of process 0 count.
    profile = run_on_all(measured, who=[0])
    fields = agreed(None if profile is None else dataclasses.asdict(profile))
    return Profile(tuple(LayerCost(**cost) for cost in fields["layers"]), fields["source"], fields["interval"])


def counted_s(function: Callable[..., Any], *structs: PyTree) -> float:
    """Estimated seconds of a function, by `estimated_s`: the same on every machine."""
    # Operations are counted in the trace, not by XLA: its cost analysis counts the body of a scan once, however often
    # it runs, and gives nothing for a program that is compiled for absent GPUs.
    return estimated_s(count_kernels(function, structs))


def measured_s(function: Callable[..., Any], *structs: PyTree, rounds: int = 5) -> float:
    """Measured seconds of a call, the median of some rounds; at least as long as it takes to start a program."""
    jitted, args = jax.jit(function), _filled(structs)
    jax.block_until_ready(jitted(*args))  # compiles, and is not counted

    def mean_s(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls - 1):
            jitted(*args)
        # The last result alone: an accelerator runs programs in the order of their calls.
        jax.block_until_ready(jitted(*args))
        return (time.perf_counter() - start) / calls

    # One call tells how many fill a round; no clock is fine enough for more than a hundred.
    calls = math.ceil(_ROUND_S / max(mean_s(1), _ROUND_S / 100))
    return statistics.median(mean_s(calls) for _ in range(rounds))


def _filled(struct: PyTree) -> PyTree:
    """Arrays of these shapes: random numbers below 0.1, integers 0, flags set."""

    # Not zeros: a layer that divides by them, or tests for them, would do other work than in training.
    def one(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.random.uniform(jax.random.key(0), leaf.shape, maxval=0.1).astype(leaf.dtype)
        return jnp.full(leaf.shape, leaf.dtype == jnp.bool_, leaf.dtype)

    return jax.jit(lambda: jax.tree.map(one, struct))()


def runnable_devices(mesh: Mesh) -> list[Any]:
    """This process's devices of a mesh on which programs can be run, and not only be compiled for them."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device for device in own if device in device.client.local_devices()]


def agreed(value: Any, pick: Callable[[list[Any]], Any] = lambda found: found[0]) -> Any:
    """A value on which all processes agree, picked from those of each, by default that of process 0; all call.

    It is one that JSON can write: a float comes back with every digit.
    """
    if jax.process_count() == 1:
        return value
    return pick([json.loads(text) for text in gather_texts(json.dumps(value))])
