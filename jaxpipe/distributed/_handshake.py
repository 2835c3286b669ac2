"""Trying every axis of a mesh before anything depends on it."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import LaunchError


def handshake(mesh: Mesh, timeout_s: float) -> None:
    """Let every device pass a number to its neighbour along each axis; all processes call.

    Args:
        mesh: The devices.
        timeout_s: Seconds that one axis may take.

    Raises:
        LaunchError: An axis did not answer in time, or gave wrong numbers; the message names the axis and the
            processes on both sides.

    Reference:
        DeepSpeed's pipeline engine lets neighbours exchange a tensor when it is built.
    """
    for axis, length in mesh.shape.items():
        if length > 1:
            _try_axis(mesh, str(axis), timeout_s)


def _try_axis(mesh: Mesh, axis: str, timeout_s: float) -> None:
    length, at = mesh.shape[axis], mesh.axis_names.index(axis)
    sharding = NamedSharding(mesh, P(*mesh.axis_names))
    places = np.indices(mesh.devices.shape)[at].astype(np.int32)
    sent = jax.make_array_from_callback(places.shape, sharding, lambda index: places[index])

    def shift(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, [(i, (i + 1) % length) for i in range(length)])

    mapped = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False))
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(jax.block_until_ready(mapped(jnp.asarray(sent))))
        except Exception as error:  # noqa: BLE001  # whatever the backend raises; reported below
            found.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"handshake along {axis}")
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise LaunchError(f"{_links(mesh, at)} must answer, but got nothing for {timeout_s:g} s. {_REPAIR}")
    if isinstance(found[0], Exception):
        first = (str(found[0]).strip().splitlines() or [""])[0]
        raise LaunchError(f"{_links(mesh, at)} must answer, but got {type(found[0]).__name__}: {first}. {_REPAIR}")
    for shard in found[0].addressable_shards:
        wanted = (places[shard.index] - 1) % length
        if not np.array_equal(np.asarray(shard.data), wanted):
            raise LaunchError(
                f"{_links(mesh, at)} must pass on what was sent, but got {np.asarray(shard.data).ravel().tolist()} in "
                f"place of {wanted.ravel().tolist()}. {_REPAIR}"
            )


_REPAIR = (
    "Check that these processes run, and the network between their nodes (NCCL_SOCKET_IFNAME and NCCL_DEBUG=INFO help)."
)


def _links(mesh: Mesh, at: int) -> str:
    """This process's links along an axis, by the processes on the other side."""
    own = jax.process_index()
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    others = set(np.roll(owners, 1, at)[owners == own].tolist()) | set(np.roll(owners, -1, at)[owners == own].tolist())
    named = ", ".join(str(process) for process in sorted(others - {own})) or "none other"
    return f"the links of process {own} along the mesh axis {mesh.axis_names[at]!r}, to process {named},"
