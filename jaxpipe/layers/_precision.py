"""Mixed precision: parameters are cast, but values between layers keep their dtypes."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.programs.jaxpr import ClosedJaxpr, all_equations, primitives

from ._tree import key_path


def cast_floats(tree: PyTree, dtype: Any, uncast: Collection[Path] = ()) -> PyTree:
    """The tree with its real floating-point leaves in `dtype`, except those at the paths `uncast`.

    Leaves are arrays, or shapes and dtypes. A `dtype` of None casts nothing.
    """
    if dtype is None:
        return tree

    def one(keys: Any, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == dtype:
            return leaf
        if uncast and key_path(keys) in uncast:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        return leaf.astype(dtype)

    return jax.tree.map_with_path(one, tree)


def init_inputs(tree: PyTree, compute_dtype: Any) -> PyTree:
    """The layer's inputs, widened to at least float32, to initialise it with."""
    if compute_dtype is None:
        return tree
    # Parameters are made in float32 before they are cast. Combining them with narrow inputs would
    # mix dtypes in a way that no run does, and a loop fails if this changes the dtype of its carry.
    return jax.tree.map(lambda x: cast_floats(x, jnp.float32) if x.dtype.itemsize < 4 else x, tree)


def widened(tree: PyTree, compute_dtype: Any) -> PyTree:
    """The variables of a layer, in `compute_dtype` if that is wider than float32."""
    # Layers make batch statistics in float32 and update them in the dtype that they compute in. Of
    # parameters, some initialisers follow JAX's default dtype and others name float32, so that the
    # users of a tied one would not agree.
    is_wide = compute_dtype is not None and jnp.dtype(compute_dtype).itemsize > 4
    return cast_floats(tree, compute_dtype) if is_wide else tree


def is_wider(tree: PyTree, dtype: Any) -> bool:
    """True if a floating-point leaf is wider than `dtype`."""
    floats = [x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return any(each.itemsize > jnp.dtype(dtype).itemsize for each in floats)


def multiplies_wider(program: ClosedJaxpr, dtype: Any) -> bool:
    """True if there are products, and all are of floating-point numbers wider than `dtype`."""
    eqns = all_equations(program.jaxpr.eqns)
    products = primitives.PLAIN_PRODUCTS
    factors = [[x.aval for x in eqn.invars[:2]] for eqn in eqns if eqn.primitive.name in products]
    return bool(factors) and all(is_wider(pair, dtype) for pair in factors)
