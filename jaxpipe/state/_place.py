"""Putting rows onto their devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._layout import is_key


def own(leaf: Any) -> Any:
    """The values of an array in memory that nobody will write into.

    On CPU a device array may be the caller's own memory, whatever `device_put(may_alias=False)` says of numpy arrays
    (seen with JAX 0.10), and elsewhere the transfer may not have begun when the caller writes the next values.

    Args:
        leaf: A numpy array, what numpy takes for one, or anything else, such as a device array.

    Returns:
        A numpy array: the given one where it is read-only down to the memory it views, and a copy where it is not.
        What is none, itself.
    """
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
        return leaf
    value = seen = np.asarray(leaf)
    while isinstance(seen, np.ndarray):
        if seen.flags.writeable:
            return value.copy()
        seen = seen.base
    return value


def place_everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """Put small host values onto every device of all processes, which must give the same.

    Args:
        tree: Numbers, arrays and keys.
        mesh: The devices.

    Returns:
        The same as arrays, each whole on every device.
    """
    sharding = NamedSharding(mesh, P())

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
            return jax.random.wrap_key_data(place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree)


def place_samples(leaf: Any, like: Any, replicas: range) -> jax.Array:
    """Put the samples of some replicas onto their devices, as a part of a global array.

    Args:
        leaf: A numpy array `[num_microbatches, microbatch_size * len(replicas), ...]`.
        like: Shape, dtype and sharding of the global array, whose dim 1 is sharded over `data`, and a dim perhaps over
            `stage`.
        replicas: The replicas; all devices of this process must belong to them.

    Returns:
        The global array `[num_microbatches, microbatch_size * data, ...]`.
    """
    value = np.asarray(own(leaf))
    first = replicas.start * (like.shape[1] // like.sharding.mesh.shape["data"])

    def share(index: Any) -> np.ndarray:
        start, stop, _ = index[1].indices(like.shape[1])
        return value[index[0], start - first : stop - first, *index[2:]]

    return jax.make_array_from_callback(like.shape, like.sharding, share)


def to_host(tree: PyTree) -> PyTree:
    """Global arrays as numpy arrays, whole, on every process; all processes call."""
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(tree)):
        return jax.device_get(tree)
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), tree)


def place_rows(make_rows: Callable[[int], Sequence[Sequence[PyTree]]], struct: PyTree, mesh: Mesh) -> PyTree:
    """Build global arrays `[num_rows, ...]`, one stage's rows at a time.

    Host memory holds one stage's rows at a time; stages without a device of this process are not made at all.

    Args:
        make_rows: Gives the rows of a stage, as numpy arrays without the first dim: for each place of the `model` axis
            (one where there is none) one for all replicas, or one for each.
        struct: Shapes, dtypes and shardings of the global arrays.
        mesh: The devices.

    Returns:
        The global arrays.
    """
    leaves, treedef = jax.tree.flatten(struct)
    shards: list[list[Any]] = [[] for _ in leaves]
    for stage, devices in enumerate(mesh.devices):
        local = [(at, d) for at, d in np.ndenumerate(devices) if d.process_index == jax.process_index()]
        if not local:
            continue
        # Before the loop over devices: on CPU those of all replicas share one copy.
        made = make_rows(stage)
        rows = [[[np.asarray(own(leaf)) for leaf in jax.tree.leaves(row)] for row in replicas] for replicas in made]
        for (replica, *place), device in local:
            replicas = rows[place[0] if place else 0]
            for held, value in zip(shards, replicas[replica if len(replicas) > 1 else 0], strict=True):
                held.append(jax.device_put(value[None], device))
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, held)
        for leaf, held in zip(leaves, shards, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
