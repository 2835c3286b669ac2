"""Splits any number of samples into microbatches, and joins the outputs again."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from jaxpipe._util.typing import PyTree
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.data import Batch, host_array, split_entry
from jaxpipe.errors import DataError, LayerError
from jaxpipe.layers import format_struct


def split_samples(
    inputs: PyTree,
    side: Mapping[str, PyTree] | None,
    size: int,
    labels: PyTree = (),
    call: str = "predict",
) -> tuple[Batch, int]:
    """Split `[num_samples, ...]` into `[num_microbatches, size, ...]`, and count the samples."""
    given = split_entry((inputs, labels, side), call)
    named = {
        name: jax.tree.map_with_path(
            lambda path, leaf, name=name: host_array(leaf, name + keystr(path)), tree
        )
        for name, tree in given._asdict().items()
    }
    counts = {
        name + keystr(path): leaf.shape[0] if leaf.ndim else None
        for name, tree in named.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    num_samples = next(iter(counts.values()), None)
    if not num_samples or set(counts.values()) != {num_samples}:
        shown = ", ".join(
            f"{name}: {'no dim' if count is None else count}" for name, count in counts.items()
        )
        raise DataError(
            "all inputs must have the same number of samples as their first dim, and at least one, "
            f"but got {shown or 'no arrays'}. Add the dim, or make their lengths equal."
        )
    num_microbatches = -(-num_samples // size)

    def split(leaf: np.ndarray) -> np.ndarray:
        # Copies of a real sample, because zeros may make a model divide by 0 or index out of range.
        missing = num_microbatches * size - num_samples
        filled = np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]) if missing else leaf
        return filled.reshape(num_microbatches, size, *leaf.shape[1:])

    return Batch(**jax.tree.map(split, named)), num_samples


def join_samples(outputs: PyTree, num_samples: int, mesh: Mesh) -> PyTree:
    """Join outputs `[num_microbatches, size, ...]` to `[num_samples, ...]`, on every device."""
    # In a program, because the host cannot slice rows on the devices of other processes.
    return jax.jit(_join, static_argnums=1, out_shardings=NamedSharding(mesh, P()))(
        outputs, num_samples
    )


def _join(outputs: PyTree, num_samples: int) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_samples], outputs)


def check_outputs(pipeline: Pipeline) -> None:
    """Raise LayerError if an output leaf has no sample dim, so that outputs cannot be joined."""
    struct: Any = pipeline.trace.boundaries[-1]
    size = jax.tree.leaves(pipeline.batches.microbatch)[0].shape[0]
    if any(leaf.shape[:1] != (size,) for leaf in jax.tree.leaves(struct)):
        raise LayerError(
            "the model's outputs must have the samples of a microbatch as their first dim to be "
            f"returned, {size} here, but got {format_struct(struct)}. Compute values of the whole "
            "microbatch in loss_fn."
        )
