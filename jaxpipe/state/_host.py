"""The global arrays of a state by name, and rows made on the host put in their place."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import PyTree

from ._layout import is_key
from ._state import TrainState

_PARTS = ("params", "opt_state", "collections")


def state_arrays(state: TrainState) -> dict[str, Any]:
    """What a state holds in rows: arrays `[num_rows, ...]` by name; keys of random numbers as the words they are.

    Args:
        state: The state, or its shapes and dtypes.

    Returns:
        The arrays, by names such as `params/stacked/trunk/0/kernel`.
    """
    return {name: _as_words(leaf) for part in _PARTS for name, leaf in _named(part, getattr(state, part))}


def with_arrays(state: TrainState, arrays: Mapping[str, jax.Array]) -> TrainState:
    """The state with some of these arrays replaced."""
    changes = {}
    for part in _PARTS:
        tree = getattr(state, part)
        leaves = [_like(old, arrays[name]) if name in arrays else old for name, old in _named(part, tree)]
        changes[part] = jax.tree.unflatten(jax.tree.structure(tree), leaves)
    return dataclasses.replace(state, **changes)


class HostRows(dict[tuple[str, int], np.ndarray]):
    """The rows of some global arrays that this process's devices hold, flattened, by the array's name and the row.

    Args:
        arrays: Shapes, dtypes and shardings by name; where they are arrays with values, rows begin with those, else
            with zeros.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        self._arrays = dict(arrays)
        for name, like in arrays.items():
            shape = like.shape[1:]
            held = {_row(shard.index): shard.data for shard in like.addressable_shards} if _has_values(like) else {}
            for row in set(_rows_by_device(like).values()):
                value = np.array(held[row]) if row in held else np.zeros(shape, like.dtype)
                self[name, row] = value.reshape(-1)

    def place(self) -> dict[str, jax.Array]:
        """Put the rows onto their devices, one array after another; they are gone from here then."""
        return {name: self._place(name, like) for name, like in self._arrays.items()}

    def _place(self, name: str, like: Any) -> jax.Array:
        rows = {row: self.pop((name, row)).reshape(1, *like.shape[1:]) for row in set(_rows_by_device(like).values())}
        shards = [jax.device_put(rows[row], device) for device, row in _rows_by_device(like).items()]
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _named(part: str, tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree.leaves_with_path(tree):
        yield f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}", leaf


def _rows_by_device(like: Any) -> dict[Any, int]:
    return {device: _row(index) for device, index in like.sharding.addressable_devices_indices_map(like.shape).items()}


def _row(index: Any) -> int:
    return index[0].start or 0


def _has_values(like: Any) -> bool:
    return isinstance(like, jax.Array)


def _as_words(leaf: Any) -> Any:
    if not is_key(leaf.dtype):
        return leaf
    if _has_values(leaf):
        return jax.random.key_data(leaf)
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def _like(old: Any, new: jax.Array) -> jax.Array:
    return (
        jax.random.wrap_key_data(new, impl=jax.random.key_impl(jnp.zeros((), old.dtype))) if is_key(old.dtype) else new
    )
