"""Putting rows onto their devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._typing import PyTree


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
        own = [(at, d) for at, d in np.ndenumerate(devices) if d.process_index == jax.process_index()]
        if not own:
            continue
        rows = [[jax.tree.leaves(row) for row in replicas] for replicas in make_rows(stage)]
        for (replica, *place), device in own:
            replicas = rows[place[0] if place else 0]
            for held, value in zip(shards, replicas[replica if len(replicas) > 1 else 0], strict=True):
                held.append(jax.device_put(value[None], device, may_alias=False))
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, held)
        for leaf, held in zip(leaves, shards, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
