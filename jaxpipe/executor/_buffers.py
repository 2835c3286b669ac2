"""Rings.

Buffers of slots, each of which holds a value from the tick that writes it to the last that reads
it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree


def make_ring(struct: PyTree, num_slots: int) -> PyTree:
    """Empty slots for trees of one shape, each leaf `[num_slots, ...]`."""
    # Zeros, not `jnp.empty`: masked actions read slots that were never written, and garbage there
    # may be NaN.
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), struct)


def to_memory(tree: PyTree, is_hosted: PyTree, space: Any) -> PyTree:
    """Move the leaves that wait in host memory into a memory; the others stay."""
    return jax.tree.map(lambda x, moves: jax.device_put(x, space) if moves else x, tree, is_hosted)


def read_ring(ring: PyTree, slot: jax.Array) -> PyTree:
    """Value in a slot; slot -1 (idle) reads slot 0."""
    at = jnp.maximum(slot, 0)
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), ring)


def write_ring(ring: PyTree, value: PyTree, slot: jax.Array) -> PyTree:
    """Overwrite a slot; the caller makes sure that an idle write goes to a slot nobody reads."""
    return jax.tree.map(
        lambda leaf, x: jax.lax.dynamic_update_index_in_dim(leaf, x, slot, 0), ring, value
    )


def write_ring_if(ring: PyTree, value: PyTree, slot: jax.Array) -> PyTree:
    """Overwrite a slot, or leave all slots as they are where the slot is -1."""
    # A select on one slot; a branch, or a select on the ring, would copy all of it.
    old = read_ring(ring, slot)
    return write_ring(ring, select(slot >= 0, value, old), jnp.maximum(slot, 0))


def select(predicate: jax.Array, a: PyTree, b: PyTree) -> PyTree:
    """Leaf by leaf `a` where the predicate holds, else `b`; NaNs in the other do not leak."""
    return jax.tree.map(lambda x, y: jnp.where(predicate, x, y), a, b)


def run_or_zeros(which: jax.Array, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """Run one of some functions that return trees of one form, or give zeros for the index -1."""
    zeros = zeros_of(jax.eval_shape(branches[0]))
    return jax.lax.switch(which + 1, [lambda: zeros, *branches])


def once(predicate: jax.Array, function: Callable[[Any, PyTree], PyTree], value: PyTree) -> PyTree:
    """`function(0, value)` where the predicate holds, else the value.

    A loop of one round or none, done in place.
    """
    return jax.lax.fori_loop(0, predicate.astype(jnp.int32), function, value)


def zeros_of(struct: PyTree) -> PyTree:
    """Zeros of given shapes and dtypes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), struct)
