"""The way between a model's leaves on the host and the global arrays of a state on the devices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._catalog import Catalog, Leaf, read_leaf, write_leaf
from ._layout import is_key
from ._state import TrainState

Index = tuple[slice, ...]
"""Place of a device's shard in a global array."""

_FIELDS = ("params", "opt_state", "collections")

Source = Callable[[Sequence[str]], Iterable[tuple[str, Any]]]
"""Gives the values of leaves by their keys in a catalog, one after another, in any order."""


def state_arrays(state: TrainState) -> dict[str, Any]:
    """The sharded arrays of a state, `[num_rows, ...]`, by name.

    Names are like `params/stacked/trunk/0/kernel`. Keys of random numbers come as the words they
    are. The state may be shapes and dtypes.
    """
    return {
        name: leaf
        for field in _FIELDS
        for name, leaf in _named(field, getattr(state, field)).items()
    }


def from_words(like: Any, words: Any) -> Any:
    """An array as `state_arrays` and catalogs give it, in the dtype of `like`.

    Keys from the words they are.
    """
    if not is_key(like.dtype):
        return words
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(jnp.zeros((), like.dtype)))


def with_arrays(state: TrainState, arrays: Mapping[str, jax.Array]) -> TrainState:
    """The state with some of these arrays replaced."""

    def replaced(path: Any, old: Any) -> Any:
        name = _path_name(path)
        return from_words(old, arrays[name]) if name in arrays else old

    return jax.tree.map_with_path(replaced, state)


def read_leaves(
    catalog: Catalog, field: str, storage: PyTree, keys: Iterable[str]
) -> dict[str, np.ndarray]:
    """Leaves on the host, of a field of a state or of arrays in the form of one, like gradients.

    All processes must call, and each gets all leaves. `field` is `params`, `opt_state` or
    `collections`; `storage` is what the state has there.
    """
    if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(storage)):
        storage = jax.device_get(storage)
    else:
        # A process sees the rows of its own devices alone. All of them are gathered, whatever
        # leaves are asked for: a collective must be called alike by all processes.
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
    """Build global arrays of a state from leaves on the host.

    Host memory holds one stage's rows at a time, and `source` is asked only for leaves that are on
    a device of this process. `like` has shapes, dtypes and shardings of the state's arrays by name.
    What is beside the leaves in the same arrays is zero. The result is as `with_arrays` takes it.
    """
    names = {span.array: None for key in keys for copy in catalog[key].copies for span in copy}
    structs = {name: like[name] for name in names}
    shards: dict[str, list[jax.Array]] = {name: [] for name in structs}
    for stage in range(num_stages):
        rows = HostRows(structs, stage, num_stages)
        rows.fill(catalog, keys, source)
        for name in structs:
            shards[name] += rows.to_devices(name)
    return {name: _whole(struct, shards[name]) for name, struct in structs.items()}


class HostRows(dict[tuple[str, int], np.ndarray]):
    """Flattened rows of global arrays that this process's devices hold, by array name and row.

    `arrays` are shapes, dtypes and shardings by name; where they have values, rows begin with
    those, else with zeros. Only the rows of `stage` are held; all `num_stages` stages have equally
    many.
    """

    def __init__(self, arrays: Mapping[str, Any], stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        self._arrays = dict(arrays)
        self._devices: dict[str, list[tuple[Any, Index]]] = {}
        for name, like in arrays.items():
            # The rows of a stage follow one another (`ShardLayout.rows_of`), so a row's quotient is
            # its stage.
            num_rows = like.shape[0] // num_stages
            indices = like.sharding.addressable_devices_indices_map(like.shape)
            self._devices[name] = [
                (device, at) for device, at in indices.items() if _row(at) // num_rows == stage
            ]
            for row in {_row(at) for _, at in self._devices[name]}:
                # Not `np.empty`: no leaf covers the padding of a row, and the optimiser runs over
                # it as over the rest.
                self[name, row] = np.zeros(math.prod(like.shape[1:]), like.dtype)
            for shard in like.addressable_shards if _has_values(like) else ():
                if (name, _row(shard.index)) in self:
                    # Of a row that is sharded over automatic axes too each shard is a block.
                    self._view(name, shard.index)[...] = np.asarray(shard.data)[0]

    def fill(self, catalog: Catalog, keys: Iterable[str], source: Source) -> None:
        """Write the leaves that these rows hold something of, each into all its copies.

        `source` gives the leaves, and is asked only for those that are needed.
        """
        for key, value in source([key for key in keys if self._holds(catalog[key])]):
            write_leaf(catalog[key], np.asarray(value), self)

    def _holds(self, leaf: Leaf) -> bool:
        return any(
            (span.array, row) in self for copy in leaf.copies for span in copy for row in span.rows
        )

    def place(self) -> dict[str, jax.Array]:
        """Put the rows onto their devices, one array after another; here they are gone then."""
        return {name: _whole(like, self.to_devices(name)) for name, like in self._arrays.items()}

    def to_devices(self, name: str) -> list[jax.Array]:
        """Put the rows of one array onto each of their devices; they are gone from here then."""
        # One host array per block of a row, whatever the number of replicas: on CPU their arrays
        # share its memory.
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
        """The block of a row that an index of the global array names."""
        return self[name, _row(index)].reshape(self._arrays[name].shape[1:])[index[1:]]


def place_everywhere(tree: PyTree, mesh: Mesh) -> PyTree:
    """Put small host values onto every device of all processes, which must give the same.

    Numbers, arrays and keys become arrays that are whole on every device.
    """
    sharding = NamedSharding(mesh, P())

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and is_key(leaf.dtype):
            # NumPy has no arrays of keys.
            return jax.random.wrap_key_data(
                place(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        value = np.asarray(leaf)
        return _from_blocks(value.shape, sharding, [value] * len(sharding.addressable_devices))

    return jax.tree.map(place, tree)


def place_samples(leaf: Any, like: Any, replicas: range, num_replicas: int) -> jax.Array:
    """Put the samples of some replicas onto their devices, as those of a global array.

    `leaf` is `[num_microbatches, microbatch_size * len(replicas), ...]`; the result has the samples
    of all `num_replicas` of the mesh. `like` is sharded over `data` along dim 1, and perhaps over
    `stage` along another. All devices of this process must belong to `replicas`.
    """
    value = np.asarray(jax.device_get(leaf) if isinstance(leaf, jax.Array) else owned(leaf))
    # Indices below are those of the global array, `value` begins with the samples of `replicas`.
    first = replicas.start * (like.shape[1] // num_replicas)

    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    spans = [slice(*index[1].indices(like.shape[1])) for index in indices]
    blocks = [
        value[index[0], span.start - first : span.stop - first, *index[2:]]
        for index, span in zip(indices, spans, strict=True)
    ]
    return _from_blocks(like.shape, like.sharding, blocks)


def owned(leaf: Any) -> Any:
    """The values of an array in memory that nobody will write into.

    On CPU a device array may be the caller's own memory, whatever `device_put(may_alias=False)`
    says of numpy arrays (seen with JAX 0.10), and elsewhere the transfer may not have begun when
    the caller writes the next values.

    A numpy array, or what numpy takes for one, is copied unless it is read-only down to the memory
    it views. Anything else, like a device array, comes back as it is.
    """
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__"):
        return leaf
    value = seen = np.asarray(leaf)
    while isinstance(seen, np.ndarray):
        if seen.flags.writeable:
            return value.copy()
        seen = seen.base
    return value


def _named(field: str, tree: PyTree) -> dict[str, Any]:
    return {
        f"{field}/{_path_name(path)}": _as_words(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _path_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _whole(like: Any, shards: Sequence[jax.Array]) -> jax.Array:
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)


def _from_blocks(
    shape: tuple[int, ...], sharding: NamedSharding, blocks: list[np.ndarray]
) -> jax.Array:
    """A global array of host values, from the blocks of this process's devices, in their order."""
    # Not `jax.make_array_from_callback`, whose transfers `jax.transfer_guard` refuses as implicit.
    placed = jax.device_put(blocks, list(sharding.addressable_devices_indices_map(shape)))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


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
