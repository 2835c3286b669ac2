"""The hardware of a mesh: known by name, or calibrated once with three small programs."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.config import PipelineConfig
from jaxpipe.errors import ConfigError

from ._hardware import HARDWARE, Hardware, named_hardware
from ._measure import agreed, runnable_devices

_REFERENCE = "h100"
_WIDTH = 1024
_COPIED = 2**26
_ROUNDS = 64


def reference_hardware(mesh: Mesh) -> Hardware:
    """Return the hardware of a mesh by name, or a default that is the same on every machine."""
    return named_hardware(mesh.devices.flat[0].device_kind) or HARDWARE[_REFERENCE]


def hardware_of(mesh: Mesh) -> Hardware:
    """Return the hardware of a mesh by name, or measured on it; all processes must call this."""
    devices = runnable_devices(mesh)
    named = named_hardware(mesh.devices.flat[0].device_kind)
    return named or (_calibrated(tuple(devices)) if devices else HARDWARE[_REFERENCE])


def limit_of(section: PipelineConfig, mesh: Mesh) -> float | None:
    """Return the bytes of a device that training may use, as set or reported; None: unknown."""
    if section.memory_limit_gb != "auto":
        return section.memory_limit_gb * 1e9
    devices = runnable_devices(mesh)
    if not devices:
        return usable_bytes(reference_hardware(mesh), mesh)
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    return None if limit is None else agreed(limit, min)


def usable_bytes(hardware: Hardware, mesh: Mesh) -> float:
    """Return the bytes of a device that training may use, without the communicators."""
    count = len(communicators(mesh))
    found = hardware.usable_bytes(count)
    if found <= 0:
        raise ConfigError(
            f"memory of hardware {hardware.name!r} must hold more than its communicators, but got "
            f"memory_bytes={hardware.memory_bytes:.3g} and {count} of "
            f"communicator_bytes={hardware.communicator_bytes:.3g}. Set a larger memory_bytes or a "
            "smaller communicator_bytes."
        )
    return found


def communicators(mesh: Mesh) -> tuple[str, ...]:
    """Return the groups of devices with a communicator: each axis, and all devices."""
    # XLA's exchanges between stages use all devices. An axis with all devices is the same group.
    axes = tuple(str(axis) for axis, size in mesh.shape.items() if size > 1)
    return axes if len(axes) <= 1 else ("all devices", *axes)


# Cached for the process, so that all pipelines built in it use the same numbers.
@functools.cache
def _calibrated(devices: tuple[Any, ...]) -> Hardware:
    """Measure the devices in process 0: the time of a product, a copy and an empty tick."""
    with jax.default_device(devices[0]):
        square = jnp.ones((_WIDTH, _WIDTH), jnp.float32)
        product_s = _seconds(jax.jit(jnp.dot), square, square)
        copy_s = _seconds(jax.jit(jnp.copy), jnp.zeros(_COPIED, jnp.int8))  # beyond the caches
    tick_s = _seconds(_ticks(devices)) / _ROUNDS
    product_s, copy_s, tick_s = agreed([product_s, copy_s, tick_s])
    copied_per_s = 2 * _COPIED / copy_s
    return Hardware(
        f"{devices[0].device_kind}, calibrated",
        # Peaks are for 16 bits; products of 32 bits are assumed to run at half of the peak.
        flops_per_s=2 * 2 * _WIDTH**3 / product_s,
        memory_bytes=2.0**50,  # the device's own limit applies, if it reports one
        bytes_per_s=copied_per_s,
        wire_bytes_per_s=copied_per_s / 2,
        network_bytes_per_s=copied_per_s / 2,
        devices_per_host=len(devices),
        gemm_share=1.0,
        attention_share=1.0,
        traffic_share=1.0,
        wire_share=1.0,
        # A round has one branch and one exchange, which cannot be distinguished.
        latency_s=tick_s / 2,
        branch_s=tick_s / 2,
    )


def _ticks(devices: tuple[Any, ...]) -> Callable[[], jax.Array]:
    """Return a loop whose rounds have a branch, an exchange and almost no work."""
    count = len(devices)
    pairs = [(i, (i + 1) % count) for i in range(count)]

    def run() -> jax.Array:
        # Neighbours take the branch alternately, like idle stages next to busy ones.
        start = jax.lax.axis_index("stage") + jnp.arange(_ROUNDS)

        def tick(x: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
            x = jax.lax.cond(now % 2 == 0, lambda y: y + 1, lambda y: y, x)
            return jax.lax.ppermute(x, "stage", pairs), None

        return jax.lax.scan(tick, jnp.zeros(1024), start)[0]

    mesh = Mesh(np.array(devices), ("stage",))
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P("stage"), check_vma=False)
    )


def _seconds(function: Callable[..., Any], *args: jax.Array) -> float:
    """Measure the seconds of a call; other programs only add time, so the minimum counts."""
    jax.block_until_ready(function(*args))
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
