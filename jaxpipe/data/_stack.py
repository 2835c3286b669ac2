"""Stacking pytrees of arrays on the host."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import DataError

_ENTRY = ("inputs", "labels", "side")
_NUMERIC_KINDS = "biufcV"  # V: bfloat16 and other types that numpy does not know itself


def stack_microbatches(entries: Sequence[Any]) -> tuple[Any, ...]:
    """Stack what an iterator yielded for one step.

    Args:
        entries: One `(inputs, labels)` or `(inputs, labels, side)` per microbatch, as tuples or lists; each part any
            pytree of arrays or numbers, alike in all entries.

    Returns:
        One tuple of the same parts, every leaf a numpy array `[num_microbatches, ...]` of the entries' dtype. They are
        read-only, so that nothing has to copy them again on their way to the devices.

    Raises:
        DataError: There is no entry, an entry is not such a tuple, or structures, shapes or dtypes differ; the message
            names leaf and entry.
    """
    if not entries:
        raise DataError("A step must have at least one microbatch, but got entries=[]. Give one entry per microbatch.")
    for index, entry in enumerate(entries):
        if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
            what = f"{type(entry).__name__}" + (f" of {len(entry)}" if isinstance(entry, tuple | list) else "")
            raise DataError(
                f"A microbatch must be a tuple (inputs, labels) or (inputs, labels, side), but got entry {index} = "
                f"a {what}. Yield such tuples, or map them with set_batch_fn."
            )
        if len(entry) != len(entries[0]):
            raise DataError(
                f"All microbatches of a step must have equally many parts, but got {len(entries[0])} in entry 0 and "
                f"{len(entry)} in entry {index}. Yield the side inputs always or never."
            )
    parts = zip(_ENTRY, zip(*entries, strict=True), strict=False)
    stacked = tuple(stack_trees(part, name, "entry") for name, part in parts)
    for leaf in jax.tree.leaves(stacked):
        leaf.flags.writeable = False
    return stacked


def stack_trees(trees: Sequence[Any], name: str, item: str) -> Any:
    """Stack pytrees leaf by leaf along a new leading dim.

    Args:
        trees: At least one pytree of arrays or numbers.
        name: What the trees are called, for messages; paths to leaves begin with it.
        item: What one tree is called, for messages.

    Returns:
        A pytree of numpy arrays `[len(trees), ...]`.

    Raises:
        DataError: A leaf is not numeric, or structures, shapes or dtypes differ.
    """
    structure = jax.tree.structure(trees[0])
    columns: list[list[np.ndarray]] = [[] for _ in range(structure.num_leaves)]
    for index, tree in enumerate(trees):
        if jax.tree.structure(tree) != structure:
            raise _structures_differ(trees[0], tree, name, f"{item} {index}", f"{item} 0")
        for column, (path, leaf) in zip(columns, jax.tree.leaves_with_path(tree), strict=True):
            array = np.asarray(leaf)
            where = name + jax.tree_util.keystr(path)
            _check_leaf(array, column[0] if column else array, where, f"{item} {index}", f"{item} 0")
            column.append(array)
    return jax.tree.unflatten(structure, [np.stack(column) for column in columns])


def _check_leaf(array: np.ndarray, first: np.ndarray, where: str, this: str, other: str) -> None:
    if array.dtype.kind not in _NUMERIC_KINDS:
        raise DataError(
            f"A leaf of a batch must be an array of numbers, but got {where} of dtype {array.dtype} in {this}. "
            "Encode it as numbers, or leave it out."
        )
    for what, got, expected in (("shape", array.shape, first.shape), ("dtype", array.dtype, first.dtype)):
        if got != expected:
            raise DataError(
                f"{where} must have the same {what} everywhere, but got {what}={got} in {this} and {what}={expected} "
                f"in {other}. Pad, cut or convert it before it is batched."
            )


def _structures_differ(first: Any, tree: Any, name: str, this: str, other: str) -> DataError:
    paths = [
        {name + jax.tree_util.keystr(path): None for path, _ in jax.tree.leaves_with_path(t)} for t in (first, tree)
    ]
    missing = [path for path in paths[0] if path not in paths[1]]
    unexpected = [path for path in paths[1] if path not in paths[0]]
    if missing:
        problem = f"no {missing[0]} in {this}"
    elif unexpected:
        problem = f"an additional {unexpected[0]} in {this}"
    else:
        problem = f"{jax.tree.structure(tree)} in {this} and {jax.tree.structure(first)} in {other}"
    return DataError(
        f"{name} must have the same structure everywhere, but got {problem}. Give it the structure it has in {other}."
    )
