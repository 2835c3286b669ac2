"""The global norm of gradients over all stages; replicas, and what several devices hold alike, count once."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._tied import drop_copies
from ._zero import Division

_EPSILON = 1e-6
"""What DeepSpeed and PyTorch add to the norm before they divide by it."""


def global_norm(tied: Mapping[str, tuple[int, ...]], division: Division, member: jax.Array, row: PyTree) -> jax.Array:
    """The L2 norm of the whole model's gradient, equal on all devices.

    Args:
        tied: Shared parameters with the stages that hold them.
        division: How gradients are divided.
        member: This device's member.
        row: Its gradients.

    Returns:
        `float32[]`.
    """
    counted = drop_copies(tied, division.kept, member, row)
    if division.num_model:
        alike, sharded = division.kept.rows.by_sharding(counted)
        squares = _sum_squares(alike) / division.num_model + _sum_squares(sharded)
    else:
        squares = _sum_squares(counted)
    return jnp.sqrt(jax.lax.psum(squares, division.row_axes))


def _sum_squares(tree: PyTree) -> jax.Array:
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return sum(squares, jnp.zeros((), jnp.float32))


def clip_to(limit: float, norm: jax.Array, grads: PyTree) -> PyTree:
    """Scale gradients so that their global norm is at most `limit`; 0 leaves them as they are."""
    if not limit:
        return grads
    factor = jnp.minimum(1.0, limit / (norm + _EPSILON))
    return jax.tree.map(lambda g: g * factor.astype(g.real.dtype), grads)
