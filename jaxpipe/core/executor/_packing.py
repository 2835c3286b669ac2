"""Packs trees of different shapes into a common form that one program can send or store.

If all trees have the same structure, shapes and dtypes, the common form is the tree itself.
Otherwise it is one flat buffer per dtype, as long as the longest tree needs. With automatic axes it
is one array per leaf instead, and leaves of the same shape and sharding share an array.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Layout, Storage, constrained, has_automatic_axes

from ._arrays import Packed
from ._buffers import zeros_of


class Packing:
    """The common form of a family of trees.

    `specs` shard the leaves of each member over automatic axes. An empty spec leaves the choice
    open. If members of equal shapes have different specs, their common form is not sharded. Without
    specs, or if the members differ in shape, XLA chooses the sharding.

    Attributes:
        structs: Shapes and dtypes of each member.
        is_identity: Whether all members are alike, so that the common form is the members' own.
        struct: Shapes and dtypes of the common form.
    """

    def __init__(self, structs: Sequence[PyTree], specs: Sequence[PyTree] = ()) -> None:
        self.structs = tuple(structs)
        # Leaves are stored in the order in which a tree is flattened. `Layout` needs names.
        self._leaves = [_by_number(jax.tree.leaves(struct)) for struct in structs]
        self._treedefs = [jax.tree.structure(struct) for struct in structs]
        self.is_identity = len({self.describe(member) for member in range(len(structs))}) <= 1
        free = [
            {n: P(*[P.UNCONSTRAINED] * x.ndim) for n, x in leaves.items()}
            for leaves in self._leaves
        ]
        # A flat buffer cannot be sharded like its leaves, so with automatic axes each leaf keeps
        # its dims.
        members = [] if self.is_identity else self._leaves
        self._layout = Layout(
            members, stack=False, specs=free if members and has_automatic_axes() else ()
        )
        first = self.structs[0] if structs else ()
        self.struct: PyTree = first if self.is_identity else self._layout.struct().packed
        self._spec: PyTree = None
        if specs and self.is_identity:
            self._spec = jax.tree.map(_common_spec, *specs)

    def describe(self, member: int) -> tuple[object, ...]:
        """Return a value that is equal for members that are packed alike."""
        return self._treedefs[member], tuple(
            (x.shape, x.dtype) for x in self._leaves[member].values()
        )

    def constrain(self, tree: PyTree, num_lead: int = 0) -> PyTree:
        """Shard a tree in common form like its members, after `num_lead` dims, as in a ring."""
        if self._spec is None:
            return tree
        return jax.tree.map(
            lambda x, spec: constrained(x, P(*[None] * num_lead, *spec)), tree, self._spec
        )

    def zeros(self) -> Packed:
        """Make the common form, filled with zeros."""
        return self.constrain(zeros_of(self.struct))

    def pack(self, member: int, tree: PyTree) -> Packed:
        """Convert a member to the common form."""
        if self.is_identity:
            return self.constrain(tree)
        return self._layout.pack_buffers(member, _by_number(jax.tree.leaves(tree)))

    def unpack(self, member: int, packed: Packed) -> PyTree:
        """Convert the common form back to the form of a member."""
        if self.is_identity:
            return self.constrain(packed)
        leaves = self._layout.unpack(member, Storage(packed))
        return jax.tree.unflatten(self._treedefs[member], list(leaves.values()))


def _common_spec(*specs: P) -> P:
    named = {spec for spec in specs if spec != P()}
    return named.pop() if len(named) == 1 else P()


def _by_number(leaves: Sequence[Any]) -> Mapping[str, Any]:
    return {str(number): leaf for number, leaf in enumerate(leaves)}
