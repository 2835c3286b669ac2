"""Copies of global arrays that training does not change."""

from collections.abc import Mapping

import jax
import numpy as np


def snapshot(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy arrays to host memory, each row on the host of its device; blocks only for the copy."""
    # On CPU nothing is copied: as long as a view of a buffer exists, a step that the buffer is
    # donated to writes its results elsewhere.
    return {
        name: _view(array) if _is_on_host(array) else _copy(array) for name, array in arrays.items()
    }


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def _view(array: jax.Array) -> jax.Array:
    shards = [
        jax.device_put(np.asarray(shard.data), shard.device, may_alias=True)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _copy(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
