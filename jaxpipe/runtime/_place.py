"""Putting rows onto their devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._typing import PyTree


def place_rows(make_rows: Callable[[int], Sequence[PyTree]], struct: PyTree, mesh: Mesh) -> PyTree:
    """Build global arrays `[num_rows, ...]`, one stage's rows at a time.

    Host memory holds one stage's rows at a time; stages without a device of this process are not made at all.

    Args:
        make_rows: Gives the rows of a stage, as numpy arrays without the first dim: one for all its replicas, or one
            for each.
        struct: Shapes, dtypes and shardings of the global arrays.
        mesh: The devices.

    Returns:
        The global arrays.
    """
    leaves, treedef = jax.tree.flatten(struct)
    shards: list[list[Any]] = [[] for _ in leaves]
    for stage, replicas in enumerate(mesh.devices):
        devices = [(at[0], d) for at, d in np.ndenumerate(replicas) if d.process_index == jax.process_index()]
        if not devices:
            continue
        rows = make_rows(stage)
        for held, *values in zip(shards, *(jax.tree.leaves(row) for row in rows), strict=True):
            held += [jax.device_put(values[r if len(rows) > 1 else 0][None], d, may_alias=False) for r, d in devices]
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, held)
        for leaf, held in zip(leaves, shards, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
