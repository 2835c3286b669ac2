"""Putting the storage of stages onto their devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree


def place_rows(make_row: Callable[[int], PyTree], struct: PyTree, mesh: Mesh) -> PyTree:
    """Build global arrays `[num_stages, ...]` sharded over `stage`, one stage's row at a time.

    Host memory holds one stage's row at a time; stages without a device of this process are not made at all.

    Args:
        make_row: Gives the storage of a stage, as numpy arrays without the stage dim.
        struct: Shapes and dtypes of the global arrays.
        mesh: The devices.

    Returns:
        The global arrays.
    """
    leaves, treedef = jax.tree.flatten(struct)
    shards: list[list[Any]] = [[] for _ in leaves]
    for stage, places in enumerate(mesh.devices):
        devices = [d for d in places.flat if d.process_index == jax.process_index()]
        if not devices:
            continue
        for held, value in zip(shards, jax.tree.leaves(make_row(stage)), strict=True):
            held += [jax.device_put(value[None], device, may_alias=False) for device in devices]
    sharding = NamedSharding(mesh, P("stage"))
    arrays = [
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, held)
        for leaf, held in zip(leaves, shards, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
