"""The global norm of gradients over all stages, and clipping by it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import sum_over

from ._layout import Storage
from ._params import Paths
from ._switch import switch_stages
from ._tied import Tied, drop_copies
from ._zero import ZeroSharding

_EPSILON = 1e-6
"""DeepSpeed and PyTorch add this to the norm before they divide by it."""


def global_norm(
    tied: Tied,
    sharding: ZeroSharding,
    shard_kind: jax.Array,
    shard: Storage,
) -> jax.Array:
    """Compute the L2 norm of the whole model's gradient, `float32[]`, equal on all devices."""
    # Every element counts once, even if several holders of a tied parameter have it. Arrays are
    # global along automatic axes.
    counted = drop_copies(tied, sharding.trained, shard_kind, shard)
    squares = _sum_squares(counted)
    # Summed only over the axes along which shards differ: replicas with equal shards count once.
    # Padding is zero.
    return jnp.sqrt(sum_over(squares, sharding.row_axes))


def layer_norms(
    paths: Sequence[Paths],
    tied: Tied,
    sharding: ZeroSharding,
    shard_kind: jax.Array,
    shard: Storage,
) -> dict[str, jax.Array]:
    """Compute gradient norms by layer name, or by the key of a tied layer; see `global_norm`."""
    counted = drop_copies(tied, sharding.trained, shard_kind, shard)
    layout = sharding.trained
    # `paths` has, for each stage, the path of each trained parameter by name.
    named = {path: _layer_of(path) for of_stage in paths for path in of_stage.values()}
    layers = sorted(set(named.values()))

    def squares(kind: int, counted: Storage) -> jax.Array:
        found = [jnp.zeros((), jnp.float32) for _ in layers]
        of_stage = paths[layout.stage_of(kind)]
        for name in layout.shards.names(kind):
            if name in of_stage:
                leaf = layout.shards.get(kind, name, counted)
                found[layers.index(named[of_stage[name]])] += _sum_squares(leaf)
        return jnp.stack(found)

    kinds = range(layout.shards.num_stages)
    own = switch_stages(shard_kind, kinds, squares, counted)
    return dict(zip(layers, jnp.sqrt(sum_over(own, sharding.row_axes)), strict=True))


def _layer_of(path: Path) -> str:
    return path[1] if path[0] == "layers" else "/".join(path[:2])


def _sum_squares(tree: PyTree) -> jax.Array:
    # In float32 or wider for all gradient dtypes. Complex gradients count by their modulus.
    sizes = [jnp.abs(leaf) for leaf in jax.tree.leaves(tree)]
    squares = [
        jnp.sum(jnp.square(size.astype(jnp.promote_types(size.dtype, jnp.float32))))
        for size in sizes
    ]
    return sum(squares, jnp.zeros((), jnp.float32))


def clip_to(limit: float, norm: jax.Array, grads: Storage) -> Storage:
    """Scale gradients so that their global norm is at most `limit`; 0 turns clipping off."""
    if not limit:
        return grads
    # Multiplied in the gradients' dtype: a float32 factor would widen bfloat16 gradients and, with
    # them, the update.
    factor = jnp.minimum(1.0, limit / (norm + _EPSILON))
    return jax.tree.map(lambda g: g * factor.astype(g.real.dtype), grads)
