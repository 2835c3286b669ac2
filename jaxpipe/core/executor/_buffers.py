"""Ring buffers, whose slots hold a value from the tick that writes it to the last that reads it.

Also small helpers on trees of arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree

from ._arrays import Ring


def make_ring(struct: PyTree, num_slots: int) -> Ring:
    """Make a ring of empty slots for trees like `struct`, with leaves `[num_slots, ...]`."""
    # Zeros, not `jnp.empty`: masked actions read slots that were never written, and garbage there
    # may be NaN.
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), struct)


def to_memory(tree: PyTree, is_hosted: PyTree, space: Any) -> PyTree:
    """Move the leaves for which `is_hosted` is true into a memory space."""
    return jax.tree.map(lambda x, moves: jax.device_put(x, space) if moves else x, tree, is_hosted)


def read_ring(ring: Ring, slot: jax.Array) -> PyTree:
    """Return the value in a slot; slot -1 (idle) reads slot 0."""
    at = jnp.maximum(slot, 0)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), ring)


def write_ring(ring: Ring, value: PyTree, slot: jax.Array) -> Ring:
    """Overwrite a slot. The caller must direct idle writes to a slot that nothing reads."""
    return jax.tree.map(
        lambda leaf, x: jax.lax.dynamic_update_index_in_dim(leaf, x, slot, 0), ring, value
    )


def write_ring_if(ring: Ring, value: PyTree, slot: jax.Array) -> Ring:
    """Overwrite a slot, or leave the ring unchanged if the slot is -1."""
    # A select on one slot; a branch, or a select on the ring, would copy all of it.
    old = read_ring(ring, slot)
    return write_ring(ring, select(slot >= 0, value, old), jnp.maximum(slot, 0))


def select(predicate: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Return `a` if the predicate is true, else `b`. NaNs in the other tree do not leak."""
    return jax.tree.map(lambda x, y: jnp.where(predicate, x, y), a, b)


def run_or_zeros(which: jax.Array, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """Run one of several functions that return like trees, or return zeros for index -1."""
    zeros = zeros_of(jax.eval_shape(branches[0]))
    return jax.lax.switch(which + 1, [lambda: zeros, *branches])


def once(predicate: jax.Array, function: Callable[[Any, PyTree], PyTree], value: PyTree) -> PyTree:
    """Return `function(0, value)` if the predicate is true, else the value."""
    # A loop that runs zero or one time writes its result in place.
    return jax.lax.fori_loop(0, predicate.astype(jnp.int32), function, value)


def zeros_of(struct: PyTree) -> PyTree:
    """Make zeros of the given shapes and dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), struct)
