"""Mixed precision: floating-point leaves in another dtype, the rest as it is."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree


def cast_floats(tree: PyTree, dtype: Any) -> PyTree:
    """The tree with its real floating-point leaves in `dtype`.

    Args:
        tree: Arrays, or their shapes and dtypes.
        dtype: The dtype wanted; None leaves all leaves as they are.

    Returns:
        A tree of the same structure; integers, booleans, complex numbers and keys stay.
    """
    if dtype is None:
        return tree

    def one(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == dtype:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        return leaf.astype(dtype)

    return jax.tree.map(one, tree)
