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
    """Sums, each in the dtype of what is added, whatever XLA takes them in.

    Complex numbers are added as their real and their imaginary parts: for TPUs XLA (libtpu 0.0.42)
    refuses to scatter their sums, and to take them beside an automatic axis. On CPUs sums of
    bfloat16 are taken in float32: there XLA (JAX 0.10) ends the process at one over a manual axis
    beside an automatic one ("Invalid binary instruction opcode copy").
    """
    device: Any = jax.sharding.get_abstract_mesh().abstract_device
    widens = device is not None and device.device_kind == "cpu"

    def parts(leaf: jax.Array) -> tuple[jax.Array, ...]:
        if jnp.iscomplexobj(leaf):
            return jnp.real(leaf), jnp.imag(leaf)
        return (leaf.astype(jnp.float32) if widens and leaf.dtype == jnp.bfloat16 else leaf,)

    def joined(leaf: jax.Array, totals: tuple[jax.Array, ...]) -> jax.Array:
        first, *others = totals
        return (jax.lax.complex(first, *others) if others else first).astype(leaf.dtype)

    return jax.tree.map(joined, tree, add(jax.tree.map(parts, tree), axes))
