"""Trees of different shapes in one common form, so that one program can move any of them.

Where all trees are alike the form is the tree itself. Otherwise it is one flat buffer per dtype, as long as the
longest.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree


class Packing:
    """The common form of a family of trees.

    Args:
        structs: Shapes and dtypes of each member.
    """

    def __init__(self, structs: Sequence[PyTree]) -> None:
        self.structs = tuple(structs)
        flat = [jax.tree.flatten(struct) for struct in structs]
        self._leaves = tuple(leaves for leaves, _ in flat)
        self._treedefs = tuple(treedef for _, treedef in flat)
        shapes = {(treedef, tuple((x.shape, x.dtype) for x in leaves)) for leaves, treedef in flat}
        self.is_identity = len(shapes) <= 1
        self._sizes: dict[str, int] = {}
        if not self.is_identity:
            for leaves in self._leaves:
                used: dict[str, int] = defaultdict(int)
                for leaf in leaves:
                    used[leaf.dtype.name] += math.prod(leaf.shape)
                for dtype, size in used.items():
                    self._sizes[dtype] = max(size, self._sizes.get(dtype, 0))

    @property
    def struct(self) -> PyTree:
        """Shapes and dtypes of the common form."""
        if self.is_identity:
            return self.structs[0] if self.structs else ()
        return {dtype: jax.ShapeDtypeStruct((size,), dtype) for dtype, size in self._sizes.items()}

    def struct_of(self, member: int) -> PyTree:
        """Shapes and dtypes of a member's own form."""
        return self.structs[member]

    def describe(self, member: int) -> tuple[object, ...]:
        """A value that is equal for members that are packed alike."""
        return self._treedefs[member], tuple((x.shape, x.dtype) for x in self._leaves[member])

    def zeros(self) -> PyTree:
        """The common form, filled with zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.struct)

    def pack(self, member: int, tree: PyTree) -> PyTree:
        """Bring a member into the common form."""
        if self.is_identity:
            return tree
        parts: dict[str, list[jax.Array]] = {dtype: [] for dtype in self._sizes}
        for leaf in jax.tree.leaves(tree):
            parts[leaf.dtype.name].append(leaf.reshape(-1))
        return {dtype: _pad(arrays, self._sizes[dtype], dtype) for dtype, arrays in parts.items()}

    def unpack(self, member: int, packed: PyTree) -> PyTree:
        """Bring the common form back into a member's own."""
        if self.is_identity:
            return packed
        offsets: dict[str, int] = defaultdict(int)
        leaves = []
        for like in self._leaves[member]:
            start, size = offsets[like.dtype.name], math.prod(like.shape)
            leaves.append(packed[like.dtype.name][start : start + size].reshape(like.shape))
            offsets[like.dtype.name] += size
        return jax.tree.unflatten(self._treedefs[member], leaves)


def _pad(arrays: Sequence[jax.Array], size: int, dtype: str) -> jax.Array:
    missing = size - sum(a.size for a in arrays)
    filler = [jnp.zeros((missing,), dtype)] if missing else []
    return jnp.concatenate([*arrays, *filler]) if len(arrays) + len(filler) != 1 else [*arrays, *filler][0]
