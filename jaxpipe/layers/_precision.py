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


def init_inputs(tree: PyTree, compute_dtype: Any) -> PyTree:
    """Inputs that a layer is initialised with: its own, no narrower than the float32 that parameters are made in.

    In a run a layer gets inputs and parameters of one dtype. Its parameters are made before they are cast, so narrow
    inputs beside them would be a mixture that no run has, and that loops refuse whose carry changes its dtype.

    Args:
        tree: The inputs in a run, or their shapes and dtypes.
        compute_dtype: What the run casts them to; None: it casts nothing, and they stay as they are.

    Returns:
        A tree of the same structure.
    """
    return tree if compute_dtype is None else cast_floats(tree, jnp.promote_types(compute_dtype, jnp.float32))
