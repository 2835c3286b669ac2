"""Times of layers, measured by one process for all processes."""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed import gather_texts, run_on_all
from jaxpipe.distributed.topology import automatic_axes
from jaxpipe.errors import PartitionError
from jaxpipe.schedules.partition import LayerCost, Profile

from ._costs import Counted, LayerWork, layer_work, look_once, loss_work

_ROUND_S = 0.01
"""Seconds for which a layer is called repeatedly, so that the launch time matters little."""

Times = tuple[float, float, float]
"""Seconds of a forward, a whole backward, and the weight gradient."""


def measured_costs(counted: Counted, mesh: Mesh, costs: Profile) -> Profile:
    """Return costs with times of the first device; all processes must call this."""
    module = counted.module
    trace = counted.trace
    labels = counted.labels
    # A layer that is sharded over automatic axes is computed whole on one device and counts with
    # its share, without exchanges.
    num_shares = math.prod(mesh.shape[axis] for axis in automatic_axes(trace.mesh))

    def times(work: LayerWork) -> list[float]:
        return [seconds / num_shares for seconds in _times_of(work)]

    def measured() -> list[list[float]]:
        devices = runnable_devices(mesh)
        if not devices:
            raise PartitionError(
                "partition_method='profile' must measure on a device of process 0, but got a mesh "
                f"of {mesh.devices.flat[0].device_kind} devices that process 0 cannot run on. Use "
                "'profile:flops', or explicit boundaries."
            )
        with jax.default_device(devices[0]):
            is_shared = [each.is_stage_sharded for each in costs.layers]
            found = look_once(
                counted.keys,
                lambda i: [0.0] * 3 if is_shared[i] else times(layer_work(module, trace, i)),
            )
            # A layer whose work all stages share is not measured, and neither is the loss after it.
            has_loss = labels is not None and module.loss_fn is not None and not is_shared[-1]
            return [*found, times(loss_work(module, trace, labels)) if has_loss else [0.0] * 3]

    # Times differ between processes, but all must make the same cut, so those of process 0 are
    # used.
    *layers, loss = agreed(run_on_all(measured, who=[0]))
    source = f"measured on {mesh.devices.flat[0].device_kind}"
    return dataclasses.replace(
        costs,
        layers=tuple(map(_timed, costs.layers, layers)),
        loss=_timed(costs.loss, loss),
        source=source,
    )


def _timed(cost: LayerCost, times: list[float]) -> LayerCost:
    forward_s, backward_s, weight_s = times
    # Because of noise, the measured part may take longer than the whole.
    return dataclasses.replace(
        cost, forward_s=forward_s, backward_s=backward_s, weight_s=min(weight_s, backward_s)
    )


def _times_of(work: LayerWork) -> Times:
    forward_s = measured_s(work.residuals.forward, work.params, work.inputs, work.context)
    backward_s = measured_s(
        work.residuals.backward, work.params, work.residuals.structs, work.cotangents
    )
    split = work.split
    if split.is_whole:
        return forward_s, backward_s, 0.0
    return (
        forward_s,
        backward_s,
        measured_s(split.backward_weight, work.params, work.residuals.structs, split.pending),
    )


def measured_s(function: Callable[..., Any], *structs: PyTree, rounds: int = 5) -> float:
    """Measure the seconds of a call with its launch, as the median of some rounds."""
    jitted = jax.jit(function)
    args = _filled(structs)
    jax.block_until_ready(jitted(*args))  # compiles; not measured

    def mean_s(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls - 1):
            jitted(*args)
        # Waiting for the last result is enough: accelerators run programs in order.
        jax.block_until_ready(jitted(*args))
        return (time.perf_counter() - start) / calls

    # One call determines how many calls fill a round; at most 100, as clocks are not fine enough.
    calls = math.ceil(_ROUND_S / max(mean_s(1), _ROUND_S / 100))
    return statistics.median(mean_s(calls) for _ in range(rounds))


def _filled(struct: PyTree) -> PyTree:
    """Return arrays of these shapes: random numbers below 0.1, integers 0, flags set."""

    # Not zeros: a layer that divides by its inputs or tests them for zero would behave differently
    # than in training.
    def one(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.random.uniform(jax.random.key(0), leaf.shape, maxval=0.1).astype(leaf.dtype)
        return jnp.full(leaf.shape, leaf.dtype == jnp.bool_, leaf.dtype)

    return jax.jit(lambda: jax.tree.map(one, struct))()


def runnable_devices(mesh: Mesh) -> list[Any]:
    """Return this process's devices of a mesh that can run programs, not only compile for them."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device for device in own if device in device.client.local_devices()]


def agreed(value: Any, pick: Callable[[list[Any]], Any] = lambda found: found[0]) -> Any:
    """Return a value picked from those of all processes, by default that of process 0.

    All processes must call this. Values travel as JSON, which preserves every digit of a float.
    """
    if jax.process_count() == 1:
        return value
    return pick([json.loads(text) for text in gather_texts(json.dumps(value))])
