"""Inputs and labels that are held in shares, one a stage, because whole they would fill every device."""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._batch import WHOLE

LARGE = 2**25
"""Bytes of one leaf of a batch, on one replica, from which on it is spread unless the settings say otherwise."""


def spread_dims(struct: PyTree, num_microbatches: int, num_stages: int, wanted: bool | None) -> PyTree:
    """Choose which leaves are spread over the stages, and along which dim.

    Args:
        struct: Shapes and dtypes of one microbatch of one replica.
        num_microbatches: Microbatches in a batch.
        num_stages: Length of the `stage` axis, which must divide the dim.
        wanted: Spread all that can be, or none; None: those of at least `LARGE` bytes.

    Returns:
        Per leaf the first dim of a microbatch that can be divided, or `WHOLE`.
    """

    def choose(leaf: Any) -> int:
        is_large = math.prod(leaf.shape) * leaf.dtype.itemsize * num_microbatches >= LARGE
        if num_stages == 1 or not (is_large if wanted is None else wanted):
            return WHOLE
        return next((d for d, n in enumerate(leaf.shape) if n and n % num_stages == 0), WHOLE)

    return jax.tree.map(choose, struct)


def batch_spec(dim: int) -> P:
    """How a leaf `[num_microbatches, microbatch_size * data, ...]` lies on the mesh.

    Args:
        dim: The dim of a microbatch along which it is spread over the stages, or `WHOLE`.
    """
    if dim == WHOLE:
        return P(None, "data")
    return P(None, ("data", "stage")) if dim == 0 else P(None, "data", *[None] * (dim - 1), "stage")
