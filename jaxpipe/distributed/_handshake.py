"""Testing the communication along every mesh axis before anything depends on it."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.mesh import off_mesh
from jaxpipe.errors import LaunchError

from ._gather import gather_numbers


def meet(call: str, timeout_s: float) -> None:
    """Block until all processes have reached a call, named `call` in errors; all must call this."""
    # Checked first, because counting processes initialises JAX's devices, which should not delay
    # the error for a wrong argument.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    found = _run_in_time(lambda: gather_numbers([0]), timeout_s, call)
    if not isinstance(found, np.ndarray):
        got = (
            f"waited {timeout_s:g} s"
            if found is None
            else f"got {_first_line(found)} when it waited"
        )
        raise LaunchError(
            f"all {jax.process_count()} processes must call {call}, but process "
            f"{jax.process_index()} {got} for the others. Look for the process that ended, or that "
            "does something else before."
        )


@off_mesh
def handshake(mesh: Mesh, timeout_s: float) -> None:
    """Send a number from every device to its neighbour along each axis.

    All processes must call this. Raises LaunchError if an axis takes longer than `timeout_s`, or
    returns wrong numbers.

    Reference:
        DeepSpeed's pipeline engine exchanges a tensor between neighbours when it is built.
    """
    for axis, length in mesh.shape.items():
        if length > 1:
            _try_axis(mesh, str(axis), timeout_s)


def _try_axis(mesh: Mesh, axis: str, timeout_s: float) -> None:
    length = mesh.shape[axis]
    at = mesh.axis_names.index(axis)
    sharding = NamedSharding(mesh, P(*mesh.axis_names))
    places = np.indices(mesh.devices.shape)[at].astype(np.int32)
    sent = jax.make_array_from_callback(places.shape, sharding, lambda index: places[index])

    def shift(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, axis, [(i, (i + 1) % length) for i in range(length)])

    mapped = jax.jit(
        jax.shard_map(
            shift, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
        )
    )
    found = _run_in_time(
        lambda: jax.block_until_ready(mapped(jnp.asarray(sent))),
        timeout_s,
        f"handshake along {axis}",
    )
    if found is None:
        raise LaunchError(
            f"{_links(mesh, at)} must answer, but got nothing for {timeout_s:g} s. {_REPAIR}"
        )
    if isinstance(found, Exception):
        raise LaunchError(
            f"{_links(mesh, at)} must answer, but got {_first_line(found)}. {_REPAIR}"
        )
    for shard in found.addressable_shards:
        wanted = (places[shard.index] - 1) % length
        if not np.array_equal(np.asarray(shard.data), wanted):
            raise LaunchError(
                f"{_links(mesh, at)} must pass on what was sent, but got "
                f"{np.asarray(shard.data).ravel().tolist()} in place of {wanted.ravel().tolist()}. "
                f"{_REPAIR}"
            )


def _run_in_time(run: Callable[[], Any], timeout_s: float, name: str) -> Any:
    """Return a function's result or the error it raised; None if it is not done in time."""
    found: list[Any] = []

    def note() -> None:
        try:
            found.append(run())
        # The backend may raise anything. The caller reports it.
        except Exception as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=note, daemon=True, name=name)
    thread.start()
    # A function that takes longer continues in its own thread.
    thread.join(timeout_s)
    return found[0] if found else None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


_REPAIR = (
    "Check that these processes run, and the network between their nodes (NCCL_SOCKET_IFNAME and "
    "NCCL_DEBUG=INFO help)."
)


def _links(mesh: Mesh, at: int) -> str:
    """Names this process's links along an axis by the processes on the other side."""
    own = jax.process_index()
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    others = set(np.roll(owners, 1, at)[owners == own].tolist()) | set(
        np.roll(owners, -1, at)[owners == own].tolist()
    )
    named = ", ".join(str(process) for process in sorted(others - {own}))
    where = f"to process {named}" if named else "inside this process"
    return f"the links of process {own} along the mesh axis {mesh.axis_names[at]!r}, {where},"
