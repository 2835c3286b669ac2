"""How a stage's parameters are divided over the `data` axis: not at all, or by elements, or by whole leaves (ZeRO-1).

A stage's full storage is what its cells compute with. A row is the part of it that one device keeps between steps,
with its share of the optimiser's state. `gather` makes the full storage of rows, `reduce` sums full gradients over the
replicas into rows.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._layout import Layout
from ._switch import switch_stages


class Shards(abc.ABC):
    """The division of one layout. A member is a distinct program of rows; see `member`.

    Attributes:
        full: Layout of the full storage, stage by stage.
        rows: Layout of the rows, member by member.
        num_shards: Rows per stage; 1 where every replica keeps all.
    """

    full: Layout
    rows: Layout
    num_shards: int

    @abc.abstractmethod
    def member(self, stage: Any, replica: Any) -> Any:
        """Index of a device's member, from its place on the axes `stage` and `data`; traceable."""

    @abc.abstractmethod
    def stage_of(self, member: int) -> int:
        """The stage that a member belongs to."""

    @abc.abstractmethod
    def replicas_of(self, member: int) -> Sequence[int]:
        """The replicas whose rows are a member's program."""

    @abc.abstractmethod
    def lies(self, stage: int, name: str) -> tuple[int, Sequence[int]]:
        """Where a leaf lies: the member, and the replicas whose rows hold it, each its piece."""

    @abc.abstractmethod
    def gather(self, stage: jax.Array, row: PyTree) -> PyTree:
        """The full storage of this device's stage, from the rows of its replicas."""

    @abc.abstractmethod
    def reduce(self, stage: jax.Array, full: PyTree) -> PyTree:
        """The sum over all replicas of full storages, of which each device gets its row."""

    @property
    def num_rows(self) -> int:
        """Rows of all stages."""
        return self.full.num_stages * self.num_shards


class Replicated(Shards):
    """Every replica keeps the full storage of its stage."""

    def __init__(self, full: Layout) -> None:
        self.full = self.rows = full
        self.num_shards = 1

    def member(self, stage: Any, replica: Any) -> Any:
        """The stage."""
        return stage

    def stage_of(self, member: int) -> int:
        """The member itself."""
        return member

    def replicas_of(self, member: int) -> Sequence[int]:
        """The first, as the only row."""
        return (0,)

    def lies(self, stage: int, name: str) -> tuple[int, Sequence[int]]:
        """In the stage's only row."""
        return stage, (0,)

    def gather(self, stage: jax.Array, row: PyTree) -> PyTree:
        """The row."""
        return row

    def reduce(self, stage: jax.Array, full: PyTree) -> PyTree:
        """The sum."""
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), full)


class _Divided(Shards):
    """Rows that differ from replica to replica."""

    def gather(self, stage: jax.Array, row: PyTree) -> PyTree:
        """Collect all rows of the stage, then put its leaves together."""
        return self._from_rows(stage, jax.tree.map(lambda x: jax.lax.all_gather(x, "data"), row))

    def reduce(self, stage: jax.Array, full: PyTree) -> PyTree:
        """Cut every leaf, then sum and scatter the cuts."""
        rows = self._to_rows(stage, full)
        return jax.tree.map(lambda x: jax.lax.psum_scatter(x, "data", scatter_dimension=0), rows)

    @abc.abstractmethod
    def _to_rows(self, stage: jax.Array, full: PyTree) -> PyTree:
        """All rows of a full storage, with a leading dim `num_shards`."""

    @abc.abstractmethod
    def _from_rows(self, stage: jax.Array, rows: PyTree) -> PyTree:
        """The inverse."""


class ByElements(_Divided):
    """Every leaf is cut into `num_shards` equal pieces, the last one padded with zeros.

    A piece of a leaf `[a, b]` has the shape `[1, k]`: as many dims as the leaf, so that masks by `ndim` keep their
    meaning.

    Args:
        full: Layout of the full storage.
        num_shards: Length of the `data` axis.
    """

    def __init__(self, full: Layout, num_shards: int) -> None:
        self.full, self.num_shards = full, num_shards
        structs = [{name: full.struct_of(s, name) for name in full.names(s)} for s in range(full.num_stages)]
        pieces = [{name: self._piece(like) for name, like in struct.items()} for struct in structs]
        self.rows = Layout(pieces, sharded=full.sharded)

    def member(self, stage: Any, replica: Any) -> Any:
        """The stage: all its rows are of one shape."""
        return stage

    def stage_of(self, member: int) -> int:
        """The member itself."""
        return member

    def replicas_of(self, member: int) -> Sequence[int]:
        """All."""
        return range(self.num_shards)

    def lies(self, stage: int, name: str) -> tuple[int, Sequence[int]]:
        """In all rows."""
        return stage, range(self.num_shards)

    def _piece(self, like: Any) -> jax.ShapeDtypeStruct:
        size = -(-math.prod(like.shape) // self.num_shards)
        return jax.ShapeDtypeStruct((1,) * (len(like.shape) - 1) + (size,), like.dtype)

    def _cut(self, leaf: Any) -> Any:
        piece = self._piece(leaf).shape
        missing = math.prod(piece) * self.num_shards - leaf.size
        flat = leaf.reshape(-1)
        return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(self.num_shards, *piece)

    def _merge(self, stage: int, name: str, pieces: Any) -> Any:
        shape = self.full.struct_of(stage, name).shape
        return pieces.reshape(-1)[: math.prod(shape)].reshape(shape)

    def _to_rows(self, stage: jax.Array, full: PyTree) -> PyTree:
        def branch(s: int) -> Callable[[PyTree], PyTree]:
            def run(packed: PyTree) -> PyTree:
                names = [name for name in self.full.names(s) if name not in self.full.stacked]
                leaves = {name: self._cut(self.full.get(s, name, {"packed": packed})) for name in names}
                return jax.vmap(lambda row: self.rows.pack_own(s, row), axis_size=self.num_shards)(leaves)

            return run

        stacked = {name: self._cut(leaf) for name, leaf in full["stacked"].items()}
        return {"stacked": stacked, "packed": self._packed(stage, branch, full["packed"])}

    def _from_rows(self, stage: jax.Array, rows: PyTree) -> PyTree:
        def branch(s: int) -> Callable[[PyTree], PyTree]:
            def run(packed: PyTree) -> PyTree:
                names = [name for name in self.full.names(s) if name not in self.full.stacked]
                get = {n: jax.vmap(lambda row, n=n: self.rows.get(s, n, {"packed": row}))(packed) for n in names}
                return self.full.pack_own(s, {name: self._merge(s, name, pieces) for name, pieces in get.items()})

            return run

        stacked = {name: self._merge(0, name, pieces) for name, pieces in rows["stacked"].items()}
        return {"stacked": stacked, "packed": self._packed(stage, branch, rows["packed"])}

    def _packed(self, stage: jax.Array, branch: Callable[[int], Callable[[PyTree], PyTree]], packed: PyTree) -> PyTree:
        if not packed:
            return {}
        return switch_stages(stage, [branch(s) for s in range(self.full.num_stages)], packed)


class ByLeaves(_Divided):
    """Every leaf lies whole in the row of one replica, for optimisers that look at a leaf as one.

    Leaves go, the largest first, to the replica that has least so far.

    Args:
        full: Layout of the full storage.
        num_shards: Length of the `data` axis.
        shared: Leaves that several stages hold; they go to the same replica on each.
    """

    def __init__(self, full: Layout, num_shards: int, shared: Sequence[str]) -> None:
        self.full, self.num_shards = full, num_shards
        self._owner = [self._assign(s, shared) for s in range(full.num_stages)]
        self.rows = Layout(
            [
                {name: full.struct_of(s, name) for name in full.names(s) if self._owner[s][name] == r}
                for s in range(full.num_stages)
                for r in range(num_shards)
            ],
            stack=False,
            sharded=full.sharded,
        )

    def member(self, stage: Any, replica: Any) -> Any:
        """Every row is a program of its own."""
        return stage * self.num_shards + replica

    def stage_of(self, member: int) -> int:
        """The stage of the row."""
        return member // self.num_shards

    def replicas_of(self, member: int) -> Sequence[int]:
        """The one whose row it is."""
        return (member % self.num_shards,)

    def lies(self, stage: int, name: str) -> tuple[int, Sequence[int]]:
        """In its owner's row."""
        owner = self._owner[stage][name]
        return stage * self.num_shards + owner, (owner,)

    def _assign(self, stage: int, shared: Sequence[str]) -> dict[str, int]:
        names = self.full.names(stage)
        used = [0] * self.num_shards
        owner = {name: i % self.num_shards for i, name in enumerate(shared)}
        sizes = {name: math.prod(self.full.struct_of(stage, name).shape) for name in names}
        for name in sorted(names, key=lambda name: (name not in owner, -sizes[name], names.index(name))):
            place = owner.setdefault(name, used.index(min(used)))
            used[place] += sizes[name]
        return {name: owner[name] for name in names}

    def _to_rows(self, stage: jax.Array, full: PyTree) -> PyTree:
        def branch(s: int) -> Callable[[PyTree], PyTree]:
            def run(full: PyTree) -> PyTree:
                leaves = self.full.unpack(s, full)
                rows = [self.rows.pack(self.member(s, r), leaves) for r in range(self.num_shards)]
                return jax.tree.map(lambda *xs: jnp.stack(xs), *rows)

            return run

        return switch_stages(stage, [branch(s) for s in range(self.full.num_stages)], full)

    def _from_rows(self, stage: jax.Array, rows: PyTree) -> PyTree:
        def branch(s: int) -> Callable[[PyTree], PyTree]:
            def run(rows: PyTree) -> PyTree:
                leaves: dict[str, jax.Array] = {}
                for r in range(self.num_shards):
                    leaves |= self.rows.unpack(self.member(s, r), jax.tree.map(lambda x, r=r: x[r], rows))
                return self.full.pack(s, leaves)

            return run

        return switch_stages(stage, [branch(s) for s in range(self.full.num_stages)], rows)
