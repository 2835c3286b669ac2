"""Shapes and dtypes of trees: reading, comparing, counting and formatting them."""

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError


def struct_of(tree: PyTree, name: str = "") -> PyTree:
    """Shapes and dtypes that leaves have on a device; `name` begins paths in messages."""

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            if not isinstance(leaf, (bool, int, float, complex)):
                raise LayerError(
                    "every leaf of a batch must be an array or a number, but got "
                    f"{name}{jax.tree_util.keystr(path)} = {type(leaf).__name__} {leaf!r}. Convert "
                    "it, or leave it out of the batch."
                )
            dtype = jnp.result_type(leaf)
        # PRNG keys have an extended dtype, which cannot be canonicalised. Others lose 64 bits if
        # x64 is off.
        is_extended = jnp.issubdtype(dtype, jax.dtypes.extended)
        return jax.ShapeDtypeStruct(
            np.shape(leaf), dtype if is_extended else jax.dtypes.canonicalize_dtype(dtype)
        )

    return jax.tree.map_with_path(one, tree)


def as_arrays(tree: PyTree) -> PyTree:
    """Leaves as JAX arrays, like those that are sent between stages."""

    def one(leaf: Any) -> jax.Array:
        # `asarray` of a Python number is weakly typed. An array between stages promotes with its
        # own dtype.
        array = jnp.asarray(leaf)
        is_extended = jnp.issubdtype(array.dtype, jax.dtypes.extended)
        return array if is_extended else jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(one, tree)


def format_struct(tree: PyTree) -> str:
    """A tree of shapes in readable form, such as `float32[4, 8]` or `{x: int32[2]}`."""
    names = jax.tree.map(lambda x: f"{x.dtype.name}[{', '.join(map(str, x.shape))}]", tree)
    return str(names).replace("'", "") if jax.tree.leaves(tree) else str(tree)


def struct_key(tree: PyTree) -> Hashable:
    """A value that is equal for trees of the same structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def num_bytes(tree: PyTree) -> int:
    """Bytes of all arrays of a tree, or of arrays of its shapes and dtypes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def device_bytes(
    tree: PyTree, mesh: Mesh | AbstractMesh | None = None, specs: PyTree = None
) -> int:
    """Bytes of a tree on each device; without a mesh, leaves have their own shardings."""
    leaves: list[Any] = jax.tree.leaves(tree)
    shardings = (
        [x.sharding for x in leaves]
        if mesh is None
        else [NamedSharding(mesh, s) for s in jax.tree.leaves(specs)]
    )
    return sum(
        math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
        for x, s in zip(leaves, shardings, strict=True)
    )
