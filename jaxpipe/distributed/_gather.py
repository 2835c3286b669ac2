"""Exchange of small host values between all processes."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.mesh import off_mesh


@off_mesh
def gather_numbers(values: Sequence[int]) -> np.ndarray:
    """Gather integers from 0 to 2**32 - 1 of all processes: `[num_processes, len(values)]`.

    All processes must call it, with equally many numbers.
    """
    own = np.asarray(values, np.uint32)[None]
    if jax.process_count() == 1:
        return own
    mesh, device, gather = _program()
    local = jax.device_put(own, device)
    shape = (jax.process_count(), own.shape[1])
    rows = jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, P(mesh.axis_names)), [local]
    )
    return np.asarray(jax.device_get(gather(rows).addressable_shards[0].data))


def gather_texts(text: str) -> list[str]:
    """Gather a text of each process, by process index; all processes must call it."""
    # File names and error messages need not be valid UTF-8.
    own = text.encode(errors="surrogatepass")
    sizes = gather_numbers([len(own)])[:, 0]
    if not sizes.any():
        return [""] * len(sizes)
    words = -(-int(sizes.max()) // 4)
    padded = np.frombuffer(own.ljust(4 * words, b"\0"), np.uint32)
    rows = gather_numbers(padded.tolist())
    return [
        row.tobytes()[:size].decode(errors="surrogatepass")
        for row, size in zip(rows, sizes, strict=True)
    ]


@cache
def _program() -> tuple[Mesh, Any, Any]:
    """A mesh of one device per process, this process's device, and a program that gathers rows."""
    firsts: dict[int, Any] = {}
    for device in _devices():
        firsts.setdefault(device.process_index, device)
    devices = np.array([firsts[i] for i in range(jax.process_count())])
    # One axis for each prime factor of the number of processes: 1,024 processes exchange in 10
    # rounds of pairs, each with 10 others. A single axis would be a ring of 1,023 hops, in which
    # each process has a connection to all others.
    factors = prime_factors(len(devices))
    names = tuple(f"factor_{i}" for i in range(len(factors)))
    mesh = Mesh(devices.reshape(factors), names, axis_types=(AxisType.Auto,) * len(names))

    def gather(rows: jax.Array) -> jax.Array:
        for name in reversed(names):
            rows = jax.lax.all_gather(rows, name, tiled=True)
        return rows

    gathered = jax.jit(
        jax.shard_map(gather, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=False)
    )
    return mesh, firsts[jax.process_index()], gathered


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number in ascending order, none for 1."""
    found = list[int]()
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            found.append(factor)
            number //= factor
    return found


def _devices() -> Sequence[Any]:
    # An exchange on the CPU devices, if JAX knows those of all processes, does not interrupt the
    # accelerators.
    try:
        found = jax.devices("cpu")
    except RuntimeError:
        return jax.devices()
    return (
        found
        if len({device.process_index for device in found}) == jax.process_count()
        else jax.devices()
    )
