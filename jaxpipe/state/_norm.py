"""The global norm of gradients over all stages, and clipping by it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.topology import sum_over

from ._layout import Storage
from ._tied import drop_copies
from ._zero import ZeroSharding

_EPSILON = 1e-6
"""Term that DeepSpeed and PyTorch add to the norm before they divide by it."""


def global_norm(
    tied: Mapping[str, tuple[int, ...]],
    sharding: ZeroSharding,
    shard_kind: jax.Array,
    shard: Storage,
) -> jax.Array:
    """L2 norm of the whole model's gradient, `float32[]`, equal on all devices.

    Every element counts once, however many devices hold it: replicas, or holders of a tied
    parameter. Arrays are whole along automatic axes. `tied` has the stages that hold each tied
    parameter.
    """
    counted = drop_copies(tied, sharding.trained, shard_kind, shard)
    squares = _sum_squares(counted)
    # Over those axes alone along which shards differ: replicas that hold the same do not add up.
    # Padding is zero.
    return jnp.sqrt(sum_over(squares, sharding.row_axes))


def _sum_squares(tree: PyTree) -> jax.Array:
    # In float32 whatever the gradients' dtype, and the modulus of complex ones.
    squares = [
        jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in jax.tree.leaves(tree)
    ]
    return sum(squares, jnp.zeros((), jnp.float32))


def clip_to(limit: float, norm: jax.Array, grads: PyTree) -> PyTree:
    """Scale gradients so that their global norm is at most `limit`; 0 leaves them as they are."""
    if not limit:
        return grads
    # In the dtype of the gradients below: a float32 factor would widen those of bfloat16 and, with
    # them, the update.
    factor = jnp.minimum(1.0, limit / (norm + _EPSILON))
    return jax.tree.map(lambda g: g * factor.astype(g.real.dtype), grads)
