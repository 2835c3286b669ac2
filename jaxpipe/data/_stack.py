"""Stacking pytrees of arrays on the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import DataError

from ._leaves import host_array

_REPAIR = "Pad, cut or convert it before it is batched"


class Batch(NamedTuple):
    """The microbatches of one step, or one microbatch.

    It is a tuple, and a pytree with arrays or shapes as leaves.

    Attributes:
        inputs: The inputs of the first layer. The leaves of a step's batch have the shape
            `[num_microbatches, microbatch_size * replicas, ...]`. The leaves of a microbatch do not
            have the first dim.
        labels: The labels that the loss compares with the model's outputs. `()` without labels.
        side: Side inputs, keyed by the names of the layers' arguments. Often empty.
    """

    inputs: PyTree
    labels: PyTree
    side: PyTree


class MicrobatchStack:
    """The microbatches of one step, each copied: an iterator may reuse its arrays."""

    def __init__(self, num_microbatches: int) -> None:
        self._parts = [_TreeStack(num_microbatches, name, "entry") for name in Batch._fields]
        self._num_parts = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Any) -> None:
        """Copy the next microbatch, a tuple or list `(inputs, labels)` or `(inputs, labels, side)`.

        Each part is a pytree of arrays or numbers. All entries have the same structure, shapes and
        dtypes; otherwise DataError names the leaf and the entry.
        """
        split = split_entry(entry, f"entry {self._count}")
        self._num_parts = self._num_parts or len(entry)
        if len(entry) != self._num_parts:
            raise DataError(
                "All microbatches of a step must have equally many parts, but got "
                f"{self._num_parts} in entry 0 and {len(entry)} in entry {self._count}. Yield the "
                "side inputs always or never."
            )
        for part, tree in zip(self._parts, split, strict=True):
            part.add(tree)
        self._count += 1

    def batch(self) -> Batch:
        """The stacked microbatches, as read-only numpy arrays `[num_microbatches, ...]`."""
        return Batch(*(part.tree() for part in self._parts))

    def entries(self) -> list[tuple[Any, ...]]:
        """Copies of the entries added so far, each a tuple with as many parts as the entry had."""
        if not self._count:
            return []
        batch = self.batch()[: self._num_parts]
        return [jax.tree.map(lambda x, m=m: x[m], batch) for m in range(self._count)]


def stack_microbatches(entries: Sequence[Any]) -> tuple[Any, ...]:
    """Stack the entries of one step, as for `MicrobatchStack.add`, into one tuple of their parts.

    Each leaf is a read-only numpy array `[num_microbatches, ...]`, with the dtype of the entries.
    """
    if not entries:
        raise DataError(
            "A step must have at least one microbatch, but got entries=[]. Give one entry per "
            "microbatch."
        )
    stack = MicrobatchStack(len(entries))
    for entry in entries:
        stack.add(entry)
    return stack.batch()[: len(entries[0])]


def split_entry(entry: Any, name: str) -> Batch:
    """Split `(inputs, labels)` or `(inputs, labels, side)`, of a microbatch or a whole batch."""
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        what = f"{type(entry).__name__}" + (
            f" of {len(entry)}" if isinstance(entry, tuple | list) else ""
        )
        raise DataError(
            "A microbatch must be a tuple (inputs, labels) or (inputs, labels, side), but got "
            f"{name} = a {what}. Yield such tuples, or map them with set_batch_fn."
        )
    inputs, labels, side = (*entry, None)[:3]
    if side is None:
        return Batch(inputs, labels, {})
    if not isinstance(side, Mapping) or not all(isinstance(key, str) for key in side):
        what = f"the keys {[*side]}" if isinstance(side, Mapping) else f"a {type(side).__name__}"
        raise DataError(
            "The side inputs of a microbatch must be a dictionary, from the names of layers' "
            f"arguments to arrays, but got side = {what} in {name}. Yield (inputs, labels, "
            "{'mask': mask}) for a layer with an argument mask."
        )
    return Batch(inputs, labels, dict(side))


def stack_trees(trees: Sequence[Any], name: str, item: str, repair: str = _REPAIR) -> Any:
    """Stack at least one pytree, leaf by leaf along a new leading dim, into numpy arrays.

    In messages, `name` is the name of the trees, `item` the name of one of them, and `repair` what
    to do if shapes or dtypes differ.
    """
    stack = _TreeStack(len(trees), name, item, repair)
    for tree in trees:
        stack.add(tree)
    return stack.tree()


class _TreeStack:
    """Pytrees stacked leaf by leaf along a new leading dim, one after another."""

    def __init__(self, size: int, name: str, item: str, repair: str = _REPAIR) -> None:
        self._size = size
        self._name = name
        self._item = item
        self._repair = repair
        self._first: Any = None
        self._columns: list[np.ndarray] = []
        self._count = 0

    def add(self, tree: Any) -> None:
        structure = jax.tree.structure(tree)
        if not self._count:
            self._first = jax.tree.map(lambda _: 0, tree)
        elif structure != jax.tree.structure(self._first):
            raise structures_differ(
                self._first, tree, self._name, f"{self._item} {self._count}", f"{self._item} 0"
            )
        for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(tree)):
            where = self._name + jax.tree_util.keystr(path)
            this = f"{self._item} {self._count}"
            array = host_array(leaf, f"{where} in {this}")
            if not self._count:
                self._columns.append(np.empty((self._size, *array.shape), array.dtype))
            column = self._columns[i]
            for what, got, first in (
                ("shape", array.shape, column[0].shape),
                ("dtype", array.dtype, column.dtype),
            ):
                if got != first:
                    raise DataError(
                        f"{where} must have the same {what} everywhere, but got {what}={got} in "
                        f"{this} and {what}={first} in {self._item} 0. {self._repair}."
                    )
            column[self._count] = array
        self._count += 1

    def tree(self) -> Any:
        # Read-only arrays are not copied again when they are sent to the devices.
        for column in self._columns:
            column.flags.writeable = False
        return jax.tree.unflatten(jax.tree.structure(self._first), self._columns)


def structures_differ(first: Any, tree: Any, name: str, this: str, other: str) -> DataError:
    """The error for two trees of different structure; `name` begins the paths of their leaves."""
    paths = [
        {name + jax.tree_util.keystr(path): None for path, _ in jax.tree.leaves_with_path(t)}
        for t in (first, tree)
    ]
    missing = [path for path in paths[0] if path not in paths[1]]
    unexpected = [path for path in paths[1] if path not in paths[0]]
    if missing and unexpected:
        problem = f"{unexpected[0]} in place of {missing[0]} in {this}"
    elif missing:
        problem = f"no {missing[0]} in {this}"
    elif unexpected:
        problem = f"an additional {unexpected[0]} in {this}"
    else:
        problem = f"{jax.tree.structure(tree)} in {this} and {jax.tree.structure(first)} in {other}"
    return DataError(
        f"{name} must have the same structure everywhere, but got {problem}. Give it the structure "
        f"it has in {other}."
    )
