"""Sums over manual mesh axes."""

import math

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree


def sum_over(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """`jax.lax.psum`, which over axes that are all one long is the values themselves."""
    # Not only for brevity: where `stage` and `data` are both one long and other axes are not, XLA drops the manual
    # region and then refuses its collectives (JAX 0.10: "must be in (partial) manual partitioning mode").
    return jax.lax.psum(tree, axes) if axes_length(axes) > 1 else tree


def broadcast_sum(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """On all places along some axes the values that one of them has, where the others have zeros: a sum, and exact."""

    def one(leaf: jax.Array) -> jax.Array:
        number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return sum_over(number, axes).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def axes_length(axes: str | tuple[str, ...]) -> int:
    """Number of places along some axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in ((axes,) if isinstance(axes, str) else axes))
