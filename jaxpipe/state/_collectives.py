"""Sums over manual mesh axes."""

import math

import jax

from jaxpipe._typing import PyTree


def sum_over(tree: PyTree, axes: str | tuple[str, ...]) -> PyTree:
    """`jax.lax.psum`, which over axes that are all one long is the values themselves."""
    # Not only for brevity: where `stage` and `data` are both one long and other axes are not, XLA drops the manual
    # region and then refuses its collectives (JAX 0.10: "must be in (partial) manual partitioning mode").
    return jax.lax.psum(tree, axes) if axes_length(axes) > 1 else tree


def axes_length(axes: str | tuple[str, ...]) -> int:
    """Number of places along some axes."""
    return math.prod(jax.lax.axis_size(axis) for axis in ((axes,) if isinstance(axes, str) else axes))
