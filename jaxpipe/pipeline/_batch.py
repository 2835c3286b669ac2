"""Shapes of batches: what an iterator yields, and what a step takes."""

from collections.abc import Sequence

import jax

from jaxpipe._typing import PyTree
from jaxpipe.data import split_entry
from jaxpipe.errors import DataError
from jaxpipe.layers import format_struct, struct_of

_PARTS = ("inputs", "labels", "side")
_LISTS = " A list of numbers is a tree of scalars: make an array of it with numpy.asarray."


def infer_microbatch_size(entry: Sequence[PyTree], num_replicas: int) -> int:
    """Samples per microbatch and replica, from the leading size of an entry's first leaf."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(struct_of(tuple(entry)))]
    return shapes[0][0] // num_replicas if shapes and shapes[0] else 0


def entry_struct(
    entry: Sequence[PyTree], microbatch_size: int, num_replicas: int, replicas: str = "data"
) -> tuple[PyTree, PyTree, PyTree]:
    """Shapes of one entry of a data iterator.

    Args:
        entry: `(inputs, labels)` or `(inputs, labels, side)`, leaves `[microbatch_size * num_replicas, ...]`.
        microbatch_size: Samples per microbatch and replica.
        num_replicas: Length of the `data` axis, or how many replicas the entry is for.
        replicas: What these are called, for the error.

    Returns:
        Shapes and dtypes of `(inputs, labels, side)`; `side` is empty where it is not given.

    Raises:
        DataError: The entry is not such a tuple, its side inputs are no dictionary, its inputs hold no array, or a leaf
            has another leading size; the leaf is named.
        LayerError: A leaf is neither an array nor a number.
    """
    parts = zip(_PARTS, split_entry(entry, "the entry"), strict=True)
    inputs, labels, side = (struct_of(part, name) for name, part in parts)
    struct = (inputs, labels, side)
    if not jax.tree.leaves(inputs):
        raise DataError(
            f"the inputs of a microbatch must hold at least one array, but got inputs={inputs!r}. Yield "
            "(inputs, labels) with the arrays that the first layer takes."
        )
    wanted = microbatch_size * num_replicas
    for name, part in zip(_PARTS, struct, strict=True):
        for path, leaf in jax.tree.leaves_with_path(part):
            if leaf.shape[:1] != (wanted,):
                raise DataError(
                    f"every leaf of a microbatch must have train_micro_batch_size_per_gpu * {replicas} = "
                    f"{microbatch_size} * {num_replicas} = {wanted} samples as its first dim, but got "
                    f"{name}{jax.tree_util.keystr(path)} = {format_struct(leaf)}. Yield {wanted} samples per entry, or "
                    f"change the batch sizes in the config.{'' if leaf.shape else _LISTS}"
                )
    return struct


def check_batch(batch: Sequence[PyTree], wanted: Sequence[PyTree], microbatch_size: int, num_replicas: int) -> None:
    """Compare a batch with the one a step was built for.

    Args:
        batch: Shapes and dtypes of `(inputs, labels, side)`.
        wanted: The same of the batch expected.
        microbatch_size: Samples per microbatch and replica.
        num_replicas: Length of the `data` axis.

    Raises:
        DataError: Structure, shapes or dtypes differ; the message names the leaf.
    """
    for name, given, like in zip(_PARTS, batch, wanted, strict=True):
        if jax.tree.structure(given) != jax.tree.structure(like):
            raise DataError(
                f"the batch's {name} must have the structure {format_struct(like)}, but got {format_struct(given)}. "
                "Give every batch the structure of the example batch."
            )
        for (path, x), leaf in zip(jax.tree.leaves_with_path(given), jax.tree.leaves(like), strict=True):
            if (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
                raise DataError(
                    f"the batch's {name}{jax.tree_util.keystr(path)} must be {format_struct(leaf)} "
                    f"([num_microbatches={leaf.shape[0]}, microbatch_size * data={microbatch_size} * {num_replicas}, "
                    f"...]), but got {format_struct(x)}. Give every batch the shapes and dtypes of the example batch."
                )
