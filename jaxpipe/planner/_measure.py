"""How long each layer takes, on a device."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import SplitBackward
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import Profile

from ._layer_work import LayerWork, costs_of_all

ROUND_S = 0.01
"""What a layer is called for again and again until it took this long, so that starting it counts for little."""


def measure_layers(
    module: PipelineModule,
    trace: ModelTrace,
    *,
    labels: PyTree = None,
    device: Any = None,
    rounds: int = 5,
    halves: bool = False,
) -> Profile:
    """Time the forward and the backward of each distinct layer, for one microbatch.

    Layers of equal traces, constants and shapes are timed once. Each half is compiled by itself, called to warm up,
    and called again in rounds, each waited for; the median round counts. Parameters and inputs are small positive
    numbers, integers are 0. A layer that is shorter than it takes to start a program counts as long as that takes.
    Layers that are split over a `model` axis are computed for all places at once and count for their share, without
    their exchanges.

    Args:
        module: The model; what it recomputes counts with the backward.
        trace: Its shapes, for one microbatch of one replica.
        labels: A microbatch's labels, or their shapes; the loss then counts with the last layer. None leaves it out.
        device: Where to run; None: this process's first device.
        rounds: Rounds to take the median of.
        halves: Whether to time the gradients of parameters by themselves, as `SplitBackward` cuts them off.
            Otherwise they are taken for half of what a backward does beside recompute, or all of it where the inputs
            have no gradient.

    Returns:
        The costs.

    Raises:
        LayerError: A layer cannot be differentiated.
    """
    device = jax.local_devices()[0] if device is None else device

    def cost(work: LayerWork) -> tuple[float, float, float | None, int]:
        forward, backward = jax.jit(work.residuals.forward), jax.jit(work.residuals.backward)
        args = _filled((work.params, work.inputs, work.context))
        params, kept, cotangents = args[0], forward(*args)[2], _filled(work.cotangents)
        seconds = [_median_s(forward, args, rounds), _median_s(backward, (params, kept, cotangents), rounds)]
        pending_bytes = 0
        if halves:
            split = SplitBackward(work.residuals, work.params)
            pending_bytes = work.bytes_of(split.pending)
            pending = jax.jit(split.input_half)(params, kept, cotangents)[2]
            weight_s = 0.0 if split.is_whole else _median_s(jax.jit(split.weight_half), (params, kept, pending), rounds)
            seconds.append(min(weight_s, seconds[1]))
        forward_s, backward_s, *rest = (value / work.num_places for value in seconds)
        return forward_s, backward_s, rest[0] if rest else None, pending_bytes

    with jax.default_device(device):
        costs = costs_of_all(module, trace, labels, cost)
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

    calls = math.ceil(ROUND_S / max(seconds(1), ROUND_S / 100))
    return statistics.median(seconds(calls) for _ in range(rounds))
