"""Transfers between a model's leaves on the host and a state's global arrays on the devices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree

from ._catalog import Catalog, Leaf, read_leaf, write_leaf
from ._layout import OptState, Storage, is_key
from ._state import TrainState

Index = tuple[slice, ...]
"""Index of a device's shard in a global array."""

_FIELDS = ("params", "opt_state", "collections")

Source = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
"""Yields `(key, value)` of leaves for catalog keys, one after another, in any order."""


def state_arrays(state: TrainState) -> dict[str, Any]:
    """Return a state's sharded arrays `[num_rows, ...]` by name; PRNG keys as their words."""
    # Names look like `params/stacked/trunk/0/kernel`. The state may consist of shapes and dtypes.
    return {
        name: leaf
        for field in _FIELDS
        for name, leaf in _named(field, getattr(state, field)).items()
    }


def from_words(like: Any, words: Any) -> Any:
    """Convert an array of `state_arrays` or a catalog back to the dtype or keys of `like`."""
    if not is_key(like.dtype):
        return words
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(jnp.zeros((), like.dtype)))


def with_arrays(state: TrainState, arrays: Mapping[str, jax.Array]) -> TrainState:
    """Return the state with some arrays replaced, by the names of `state_arrays`."""

    def replaced(path: Any, old: Any) -> Any:
        name = _path_name(path)
        return from_words(old, arrays[name]) if name in arrays else old

    return jax.tree.map_with_path(replaced, state)


def read_leaves(
    catalog: Catalog, field: str, storage: Storage | OptState, keys: Iterable[str]
) -> dict[str, np.ndarray]:
    """Read leaves of a field, or of arrays laid out like it, to every host. All must call it."""
    # JAX cannot read an array without elements that a program has returned on several devices.
    storage = jax.tree.map(lambda x: x if x.size else jnp.zeros(x.shape, x.dtype), storage)
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(storage)):
        storage = jax.device_get(storage)
    else:
        # A process only sees the rows of its own devices. All rows are gathered, whatever leaves
        # are wanted, because all processes must call a collective in the same way.
        storage = jax.tree.map(
            lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), storage
        )
    arrays = _named(field, storage)
    return {
        key: read_leaf(catalog[key], lambda name, row: arrays[name][row].reshape(-1))
        for key in keys
    }


def place_leaves(
    catalog: Catalog, like: Mapping[str, Any], keys: Sequence[str], source: Source, num_stages: int
) -> dict[str, Any]:
    """Build global arrays of a state, for `with_arrays`, from leaves on the host."""
    # `like` has the shapes, dtypes and shardings of the state's arrays. Elements of these arrays
    # that belong to other leaves are zero.
    names = {span.array: None for key in keys for copy in catalog[key].copies for span in copy}
    structs = {name: like[name] for name in names}
    shards: dict[str, list[jax.Array]] = {name: [] for name in structs}
    # Host memory holds the rows of one stage at a time, and only leaves that are on a device of
    # this process are requested from `source`.
    for stage in range(num_stages):
        rows = HostRows(structs, stage, num_stages)
        rows.fill(catalog, keys, source)
        for name in structs:
            shards[name] += rows.to_devices(name)
    return {name: _whole(struct, shards[name]) for name, struct in structs.items()}


class HostRows(dict[tuple[str, int], np.ndarray]):
    """Flattened rows of global arrays on this process's devices, by array name and row.

    `arrays` are arrays, or shapes, dtypes and shardings. Rows start with the arrays' values, or
    with zeros. Only the rows of `stage` are included. All `num_stages` stages have the same number
    of rows.
    """

    def __init__(self, arrays: Mapping[str, Any], stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        self._arrays = dict(arrays)
        self._devices: dict[str, list[tuple[Any, Index]]] = {}
        for name, like in arrays.items():
            # The rows of a stage are consecutive (`ShardLayout.rows_of`), so a division gives a
            # row's stage.
            num_rows = like.shape[0] // num_stages
            indices = like.sharding.addressable_devices_indices_map(like.shape)
            self._devices[name] = [
                (device, at) for device, at in indices.items() if _row(at) // num_rows == stage
            ]
            for row in {_row(at) for _, at in self._devices[name]}:
                # Not `np.empty`: no leaf covers the padding of a row, but the optimiser processes
                # it like the rest.
                self[name, row] = np.zeros(math.prod(like.shape[1:]), like.dtype)
            for shard in like.addressable_shards if _has_values(like) else ():
                if (name, _row(shard.index)) in self:
                    # If the row is also sharded over automatic axes, each shard is a block of it.
                    self._view(name, shard.index)[...] = np.asarray(shard.data)[0]

    def fill(self, catalog: Catalog, keys: Iterable[str], source: Source) -> None:
        """Write all leaves with elements in these rows; no others are requested from `source`."""
        for key, value in source([key for key in keys if self._holds(catalog[key])]):
            write_leaf(catalog[key], np.asarray(value), self)

    def _holds(self, leaf: Leaf) -> bool:
        return any(
            (span.array, row) in self for copy in leaf.copies for span in copy for row in span.rows
        )

    def place(self) -> dict[str, jax.Array]:
        """Put the rows onto their devices, one array after another, and drop them here."""
        return {name: _whole(like, self.to_devices(name)) for name, like in self._arrays.items()}

    def to_devices(self, name: str) -> list[jax.Array]:
        """Put the rows of one array onto their devices, and drop them here."""
        # One host array per block of a row, whatever the number of replicas: on CPU the replicas'
        # arrays share its memory.
        blocks: dict[str, np.ndarray] = {}
        placed = []
        for device, index in self._devices[name]:
            if str(index) not in blocks:
                blocks[str(index)] = np.ascontiguousarray(self._view(name, index)[None])
            placed.append(jax.device_put(blocks[str(index)], device))
        for row in {_row(index) for _, index in self._devices[name]}:
            del self[name, row]
        return placed

    def _view(self, name: str, index: Index) -> np.ndarray:
        """Return the block of a row at an index of the global array."""
        return self[name, _row(index)].reshape(self._arrays[name].shape[1:])[index[1:]]


def place_everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """Put small host values onto every device. All processes must pass the same values."""
    sharding = NamedSharding(mesh, P())

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
            # NumPy has no dtype for PRNG keys.
            return jax.random.wrap_key_data(
                place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        value = np.asarray(leaf)
        return _from_blocks(value.shape, sharding, [value] * len(sharding.addressable_devices))

    return jax.tree.map(place, tree)


def place_samples(leaf: Any, like: Any, replicas: range, num_replicas: int) -> jax.Array:
    """Put the samples of `replicas` onto their devices, as part of the array of all replicas."""
    value = np.asarray(jax.device_get(leaf) if isinstance(leaf, jax.Array) else owned(leaf))
    # The indices below are indices of the global array, but `value` starts with the samples of
    # `replicas`.
    first = replicas.start * (like.shape[1] // num_replicas)

    # `leaf` is `[num_microbatches, microbatch_size * len(replicas), ...]`. `like` is sharded over
    # `data` along dim 1, and may be sharded over `stage` along another dim. All devices of this
    # process belong to `replicas`.
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    spans = [slice(*index[1].indices(like.shape[1])) for index in indices]
    blocks = [
        value[index[0], span.start - first : span.stop - first, *index[2:]]
        for index, span in zip(indices, spans, strict=True)
    ]
    return _from_blocks(like.shape, like.sharding, blocks)


def owned(leaf: Any) -> Any:
    """Return an array's values in memory that the caller cannot overwrite."""
    # On CPU a device array may alias the caller's memory, even with `device_put(may_alias=False)`
    # on numpy arrays (seen with JAX 0.10). On other devices the transfer may not have begun when
    # the caller writes the next values.
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
        return leaf
    # A copy, unless the array and all memory that it views are read-only.
    value = seen = np.asarray(leaf)
    while isinstance(seen, np.ndarray):
        if seen.flags.writeable:
            return value.copy()
        seen = seen.base
    return value


def _named(field: str, tree: Storage | OptState) -> dict[str, Any]:
    return {
        f"{field}/{_path_name(path)}": words_of(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _whole(like: Any, shards: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _from_blocks(
    shape: tuple[int, ...], sharding: NamedSharding, blocks: list[np.ndarray]
) -> jax.Array:
    """Make a global array from host blocks, one per device of this process in their order."""
    # Not `jax.make_array_from_callback`: `jax.transfer_guard` rejects its transfers as implicit.
    placed = jax.device_put(blocks, list(sharding.addressable_devices_indices_map(shape)))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _row(index: Any) -> int:
    return index[0].start or 0


def _has_values(like: Any) -> bool:
    return isinstance(like, jax.Array)


def words_of(leaf: Any) -> Any:
    """Convert an array of PRNG keys, or its shape and dtype, to words; others are unchanged."""
    if not is_key(leaf.dtype):
        return leaf
    if _has_values(leaf):
        return jax.random.key_data(leaf)
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)
