"""Small values from every process to every process, on the host's side."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def gather_numbers(values: Sequence[int]) -> np.ndarray:
    """The numbers of each process; all processes call, with equally many.

    Where JAX knows the processors of all processes the exchange runs there, and accelerators go on
    with what they do.

    Args:
        values: Integers from 0 to 2**32 - 1.

    Returns:
        Shape `[num_processes, len(values)]`, in the order of process indices.
    """
    own = np.asarray(values, np.uint32)[None]
    if jax.process_count() == 1:
        return own
    mesh, device, gather = _program()
    local = jax.device_put(own, device)
    shape = (jax.process_count(), own.shape[1])
    rows = jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, P("process")), [local]
    )
    return np.asarray(jax.device_get(gather(rows).addressable_shards[0].data))


def gather_texts(text: str) -> list[str]:
    """A text of each process, in the order of process indices; all processes call."""
    # What a file's name or an error brings with it need not be UTF-8.
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
    mesh = Mesh(np.array([firsts[i] for i in range(jax.process_count())]), ("process",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
    return mesh, firsts[jax.process_index()], gather


def _devices() -> Sequence[Any]:
    try:
        found = jax.devices("cpu")
    except RuntimeError:
        return jax.devices()
    return (
        found
        if len({device.process_index for device in found}) == jax.process_count()
        else jax.devices()
    )
