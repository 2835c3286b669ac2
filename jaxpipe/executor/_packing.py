"""Trees of different shapes in one common form, so that one program can send or store any of them.

Where all trees are alike the form is the tree itself. Otherwise it is one flat buffer per dtype, as
long as the longest; with automatic axes, an array for each leaf, which leaves of one shape and
sharding share.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.state import Layout, Storage, constrained, has_automatic_axes

from ._buffers import zeros_of


class Packing:
    """The common form of a family of trees.

    `specs` shard each member's leaves over automatic axes; an empty spec says nothing. Where alike
    members say different things, their common form is whole. Without specs, or where members are
    not alike, XLA chooses.

    Attributes:
        structs: The same.
        is_identity: Whether all members are alike, and the common form is theirs.
        struct: Shapes and dtypes of the common form.
    """

    def __init__(self, structs: Sequence[PyTree], specs: Sequence[PyTree] = ()) -> None:
        self.structs = tuple(structs)
        # The order in which a tree is flattened is the order in the buffers; `Layout` asks for
        # names.
        self._leaves = [_by_number(jax.tree.leaves(struct)) for struct in structs]
        self._treedefs = [jax.tree.structure(struct) for struct in structs]
        self.is_identity = len({self.describe(member) for member in range(len(structs))}) <= 1
        free = [
            {n: P(*[P.UNCONSTRAINED] * x.ndim) for n, x in leaves.items()}
            for leaves in self._leaves
        ]
        # A flat buffer cannot be sharded as its leaves are, so with automatic axes each leaf keeps
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
        """A value that is equal for members that are packed alike."""
        return self._treedefs[member], tuple(
            (x.shape, x.dtype) for x in self._leaves[member].values()
        )

    def constrain(self, tree: PyTree, num_lead: int = 0) -> PyTree:
        """A tree in the common form, sharded over automatic axes as its members are.

        The form follows `num_lead` dims, for example that of a ring's slots.
        """
        if self._spec is None:
            return tree
        return jax.tree.map(
            lambda x, spec: constrained(x, P(*[None] * num_lead, *spec)), tree, self._spec
        )

    def zeros(self) -> PyTree:
        """The common form, filled with zeros."""
        return self.constrain(zeros_of(self.struct))

    def pack(self, member: int, tree: PyTree) -> PyTree:
        """Bring a member into the common form."""
        if self.is_identity:
            return self.constrain(tree)
        return self._layout.pack_buffers(member, _by_number(jax.tree.leaves(tree)))

    def unpack(self, member: int, packed: PyTree) -> PyTree:
        """Bring the common form back into a member's own."""
        if self.is_identity:
            return self.constrain(packed)
        leaves = self._layout.unpack(member, Storage(packed))
        return jax.tree.unflatten(self._treedefs[member], list(leaves.values()))


def _common_spec(*specs: P) -> P:
    named = {spec for spec in specs if spec != P()}
    return named.pop() if len(named) == 1 else P()


def _by_number(leaves: Sequence[Any]) -> Mapping[str, Any]:
    return {str(number): leaf for number, leaf in enumerate(leaves)}
