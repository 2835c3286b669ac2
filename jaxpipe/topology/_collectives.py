"""Sums over manual mesh axes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

Axes = str | tuple[str, ...]

_LAX: Any = jax.lax
"""JAX does not say the types of its collectives."""


def sum_over(tree: PyTree, axes: Axes) -> PyTree:
    """`jax.lax.psum`, which over axes that are all one long is the values themselves."""
    # Not only for brevity: where `stage` and `data` are both one long and other axes are not, XLA
    # drops the manual region and then refuses its collectives (JAX 0.10: "must be in (partial)
    # manual partitioning mode").
    if axes_length(axes) == 1:
        return tree
    return _added(_LAX.psum, tree, axes)


def scatter_sum(tree: PyTree, axis: str) -> PyTree:
    """`jax.lax.psum_scatter` along the first dim, which is as long as the axis and goes."""
    return _added(_LAX.psum_scatter, tree, axis)


def broadcast_sum(tree: PyTree, axes: Axes) -> PyTree:
    """On all places along some axes the values of one, where the others have zeros: exact."""

    def one(leaf: jax.Array) -> jax.Array:
        number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return sum_over(number, axes).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def axes_length(axes: Axes) -> int:
    """Number of places along some axes."""
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(jax.lax.axis_size(axis) for axis in names)


def _added(add: Callable[[PyTree, Axes], PyTree], tree: PyTree, axes: Axes) -> PyTree:
    """Sums, each in the dtype of what is added; on CPUs those of bfloat16 are taken in float32."""
    # There XLA (JAX 0.10) ends the process at a bfloat16 sum over a manual axis beside an automatic
    # one ("Invalid binary instruction opcode copy").
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind != "cpu":
        return add(tree, axes)

    def widened(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    def narrowed(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return total.astype(leaf.dtype)

    return jax.tree.map(narrowed, add(jax.tree.map(widened, tree), axes), tree)
