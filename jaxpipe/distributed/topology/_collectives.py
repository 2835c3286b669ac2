"""Sums over manual mesh axes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree

Axes = str | tuple[str, ...]

_LAX: Any = jax.lax
"""Typed as Any, because JAX does not annotate its collectives."""


def sum_over(tree: PyTree, axes: Axes) -> PyTree:
    """`jax.lax.psum` over manual axes, but the values themselves if all have length 1."""
    # The shortcut is required: if `stage` and `data` have length 1 and other axes do not, XLA drops
    # the manual region and then refuses its collectives (JAX 0.10: "must be in (partial) manual
    # partitioning mode").
    if axes_length(axes) == 1:
        return tree
    return _added(_LAX.psum, tree, axes)


def scatter_sum(tree: PyTree, axis: str) -> PyTree:
    """`jax.lax.psum_scatter` over a manual axis, along the first dim, which it removes."""
    return _added(_LAX.psum_scatter, tree, axis)


def broadcast_sum(tree: PyTree, axes: Axes) -> PyTree:
    """Broadcast values from one device along manual axes; the others must have zeros."""

    # A sum with zeros is exact.
    def one(leaf: jax.Array) -> jax.Array:
        number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        return sum_over(number, axes).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def axes_length(axes: Axes) -> int:
    """The number of devices along one or several manual axes."""
    names = (axes,) if isinstance(axes, str) else axes
    return math.prod(jax.lax.axis_size(axis) for axis in names)


def _added(add: Callable[[PyTree, Axes], PyTree], tree: PyTree, axes: Axes) -> PyTree:
    """Sums with the dtype of their operands, whatever dtype XLA computes them in."""
    # Complex numbers are summed as separate real and imaginary parts: for TPUs, XLA (libtpu 0.0.42)
    # cannot scatter complex sums, and cannot compute them if there is an automatic axis. On CPUs,
    # bfloat16 is summed in float32: there XLA (JAX 0.10) aborts the process at a bfloat16 sum over
    # a manual axis if there is an automatic one ("Invalid binary instruction opcode copy").
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
