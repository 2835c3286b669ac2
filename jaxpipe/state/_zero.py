"""ZeRO-1.

What each replica keeps of its stage's parameters between steps, and the way to all of them and
back.

A stage's gathered storage is what its layers compute with. A shard is the part of it that one
device keeps between steps, together with the optimiser's state for that part. `gather` puts the
storage together from the shards of all replicas; `reduce` sums gradients over the replicas and
leaves each its shard of the sum.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe.jaxpr import spec_axes
from jaxpipe.layers import unflatten_dict
from jaxpipe.optim import is_elementwise
from jaxpipe.topology import scatter_sum, sum_over

from ._layout import Layout, Storage, constrained
from ._params import ModelParams
from ._switch import switch_stages

Buffers = dict[str, jax.Array]
"""Packed buffers of one stage, by dtype."""


class ShardLayout(abc.ABC):
    """Cut of all stages' storage into shards, one for each replica or one for all of them.

    Shards are numbered by their kind: devices whose shards have the same leaves in the same places
    run one program. A kind of shard belongs to one stage.

    Attributes:
        gathered: Layout of the whole storage, stage by stage.
        shards: Layout of the shards, kind by kind.
        num_shards: Shards of a stage; 1 where every replica keeps all of its parameters.
        is_uniform: All shards of a stage are of one kind, so that kinds are stages; else each shard
            has its own.
    """

    gathered: Layout
    shards: Layout
    num_shards: int
    is_uniform: bool

    def shard_kind(self, stage: Any, replica: Any) -> Any:
        """Form of a device's shard, by its indices along the axes `stage` and `data`; traceable."""
        return stage if self.is_uniform else stage * self.num_shards + replica

    def stage_of(self, shard_kind: int) -> int:
        """The stage that a kind of shard belongs to."""
        return shard_kind if self.is_uniform else shard_kind // self.num_shards

    def shard_kinds(self, stage: int) -> list[int]:
        """The kinds of a stage's shards."""
        return [
            shard_kind
            for shard_kind in range(self.shards.num_stages)
            if self.stage_of(shard_kind) == stage
        ]

    def shard_kind_of(self, stage: int, name: str) -> int:
        """The kind of the shards of a stage that a leaf lies in."""
        return next(
            shard_kind
            for shard_kind in self.shard_kinds(stage)
            if name in self.shards.names(shard_kind)
        )

    def rows_of(self, shard_kind: int) -> tuple[int, ...]:
        """The rows of the global arrays that are shards of a kind.

        Stage after stage, in each by replica.
        """
        return (
            tuple(range(shard_kind * self.num_shards, (shard_kind + 1) * self.num_shards))
            if self.is_uniform
            else (shard_kind,)
        )

    def block_counts(self, name: str) -> tuple[int, ...]:
        """Into how many blocks a leaf is cut along each dim before each block is cut into shards.

        Empty: none.
        """
        return ()

    def piece_of(self, name: str, leaf: jax.Array, replica: jax.Array) -> jax.Array:
        """The piece of a leaf in a replica's shard, where it holds any."""
        return leaf

    @property
    def stages_of_shard_kinds(self) -> list[int]:
        """The stage of each kind of shard."""
        return [self.stage_of(shard_kind) for shard_kind in range(self.shards.num_stages)]

    @abc.abstractmethod
    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """The whole storage of this device's stage, from the shards of its replicas."""

    @abc.abstractmethod
    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """The sum over all replicas of whole storages, of which each device gets its shard."""


class Replicated(ShardLayout):
    """Every replica keeps the whole storage of its stage."""

    num_shards = 1
    is_uniform = True

    def __init__(self, gathered: Layout) -> None:
        self.gathered = self.shards = gathered

    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """The shard."""
        return shard

    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """The sum."""
        return sum_over(storage, "data")


class _Sharded(ShardLayout):
    """Shards that differ from replica to replica."""

    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """Collect all shards of the stage, then put its leaves together."""
        return self._merge(stage, jax.tree.map(lambda x: jax.lax.all_gather(x, "data"), shard))

    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """Cut every leaf, then sum and scatter the cuts."""
        # One reduce-scatter, and with the gather of the next step it sends what one all-reduce
        # would.
        return scatter_sum(self._cut(stage, storage), "data")

    @abc.abstractmethod
    def _cut(self, stage: jax.Array, storage: Storage) -> Storage:
        """All shards of a whole storage, with a leading dim `num_shards`."""

    @abc.abstractmethod
    def _merge(self, stage: jax.Array, shards: Storage) -> Storage:
        """The inverse."""


class ByElements(_Sharded):
    """Every leaf is cut into `num_shards` equal pieces, the last one padded with zeros.

    A piece of a leaf `[a, b]` has the shape `[1, k]`: as many dims as the leaf, so that masks by
    `ndim`, like those that keep biases out of weight decay, say the same of the piece. What is
    sharded over automatic axes is cut block by block, so that nothing leaves its place: a piece of
    a leaf of m blocks has the shape `[1, m * k]`, sharded over the last dim, with a piece of each
    block. `gathered` is the layout of the whole storage.
    """

    is_uniform = True

    def __init__(self, gathered: Layout, num_shards: int, mesh: Mapping[str, int]) -> None:
        self.gathered, self.num_shards = gathered, num_shards
        self._blocks = {name: _block_counts(spec, mesh) for name, spec in gathered.specs.items()}
        structs = [
            {name: gathered.struct_of(s, name) for name in gathered.names(s)}
            for s in range(gathered.num_stages)
        ]
        specs = {
            name: P(
                *[None] * (len(spec) - 1), tuple(axis for axes in spec for axis in spec_axes(axes))
            )
            for name, spec in gathered.specs.items()
        }
        pieces = [
            {name: self._piece(name, like) for name, like in struct.items()} for struct in structs
        ]
        self.shards = Layout(
            pieces,
            specs=[{name: specs[name] for name in each if name in specs} for each in pieces],
            frozen=gathered.frozen,
        )

    def block_counts(self, name: str) -> tuple[int, ...]:
        """See `ShardLayout.block_counts`.

        One for each place of the axes that the leaf is sharded over.
        """
        return self._blocks.get(name, ())

    def piece_of(self, name: str, leaf: jax.Array, replica: jax.Array) -> jax.Array:
        """See `ShardLayout.piece_of`."""
        return self._to_pieces(name, leaf)[replica]

    def _piece(self, name: str, like: Any) -> jax.ShapeDtypeStruct:
        num_blocks = math.prod(self._blocks.get(name, ()))
        # Rounded up block by block: `all_gather` and `psum_scatter` take pieces of one size from
        # all replicas.
        size = -(-math.prod(like.shape) // num_blocks // self.num_shards) * num_blocks
        return jax.ShapeDtypeStruct((1,) * (len(like.shape) - 1) + (size,), like.dtype)

    def _to_pieces(self, name: str, leaf: jax.Array) -> jax.Array:
        piece = self._piece(name, leaf)
        blocks = _to_blocks(leaf, self._blocks.get(name, (1,) * leaf.ndim))
        missing = piece.size * self.num_shards // len(blocks) - blocks.shape[1]
        blocks = jnp.pad(blocks, ((0, 0), (0, missing))) if missing else blocks
        # [blocks, shards, k] -> [shards, ..., blocks * k]
        pieces = jnp.swapaxes(blocks.reshape(len(blocks), self.num_shards, -1), 0, 1)
        return self._constrained(name, pieces.reshape(self.num_shards, *piece.shape))

    def _to_leaf(self, stage: int, name: str, pieces: jax.Array) -> jax.Array:
        shape = self.gathered.struct_of(stage, name).shape
        counts = self._blocks.get(name, (1,) * len(shape))
        num_blocks = math.prod(counts)
        pieces = self._constrained(name, pieces)
        blocks = jnp.swapaxes(pieces.reshape(self.num_shards, num_blocks, -1), 0, 1).reshape(
            num_blocks, -1
        )
        leaf = _from_blocks(blocks[:, : math.prod(shape) // num_blocks], counts, shape)
        return constrained(leaf, self.gathered.specs.get(name, P()))

    def _constrained(self, name: str, pieces: jax.Array) -> jax.Array:
        return constrained(pieces, P(None, *self.shards.specs.get(name, ())))

    def _cut(self, stage: jax.Array, storage: Storage) -> Storage:
        def cut(s: int, packed: Buffers) -> Buffers:
            leaves = {
                name: self.gathered.get(s, name, Storage(packed))
                for name in _packed_names(self.gathered, s)
            }
            pieces = {name: self._to_pieces(name, leaf) for name, leaf in leaves.items()}
            return jax.vmap(
                lambda piece: self.shards.pack_buffers(s, piece), axis_size=self.num_shards
            )(pieces)

        stacked = {name: self._to_pieces(name, leaf) for name, leaf in storage.stacked.items()}
        return Storage(self._switch(stage, cut, storage.packed), stacked)

    def _merge(self, stage: jax.Array, shards: Storage) -> Storage:
        def merge(s: int, packed: Buffers) -> Buffers:
            leaves = {}
            for name in _packed_names(self.gathered, s):
                pieces = jax.vmap(lambda one, name=name: self.shards.get(s, name, Storage(one)))(
                    packed
                )
                leaves[name] = self._to_leaf(s, name, pieces)
            return self.gathered.pack_buffers(s, leaves)

        # Stacked leaves have one shape on all stages: that of stage 0.
        stacked = {name: self._to_leaf(0, name, pieces) for name, pieces in shards.stacked.items()}
        return Storage(self._switch(stage, merge, shards.packed), stacked)

    def _switch(
        self, stage: jax.Array, function: Callable[[int, Buffers], Buffers], packed: Buffers
    ) -> Buffers:
        return (
            switch_stages(stage, range(self.gathered.num_stages), function, packed)
            if packed
            else {}
        )


class ByLeaves(_Sharded):
    """Every leaf is whole in the shard of one replica.

    This is for optimisers that look at a leaf as one, like LAMB. Leaves go, the largest first, to
    the replica that has least so far. `tied` leaves, which several stages hold, go to the same
    replica on each: only devices of one replica meet in a sum over the stages.
    """

    is_uniform = False

    def __init__(self, gathered: Layout, num_shards: int, tied: Sequence[str]) -> None:
        self.gathered, self.num_shards = gathered, num_shards
        owners = [self._assign(s, tied) for s in range(gathered.num_stages)]
        # Not stacked: what all stages hold alike lies in the shards of other replicas here and
        # there.
        shards = [
            {
                name: gathered.struct_of(s, name)
                for name in gathered.names(s)
                if owners[s][name] == replica
            }
            for s in range(gathered.num_stages)
            for replica in range(num_shards)
        ]
        specs = [
            {name: gathered.specs[name] for name in shard if name in gathered.specs}
            for shard in shards
        ]
        self.shards = Layout(shards, stack=False, specs=specs, frozen=gathered.frozen)

    def _assign(self, stage: int, tied: Sequence[str]) -> dict[str, int]:
        """The replica that owns each leaf of a stage."""
        names = self.gathered.names(stage)
        used = [0] * self.num_shards
        owner = {name: i % self.num_shards for i, name in enumerate(tied)}
        sizes = {name: math.prod(self.gathered.struct_of(stage, name).shape) for name in names}
        frozen = self.gathered.frozen
        # Tied leaves before all others: their replicas are given, and the rest is dealt out around
        # what they take. What is frozen last: without it, as in gradients, the others are dealt out
        # alike.
        for name in sorted(
            names, key=lambda n: (n not in owner, n in frozen, -sizes[n], names.index(n))
        ):
            replica = owner.setdefault(name, used.index(min(used)))
            used[replica] += sizes[name]
        return {name: owner[name] for name in names}

    def _cut(self, stage: jax.Array, storage: Storage) -> Storage:
        def cut(s: int, storage: Storage) -> Storage:
            leaves = self.gathered.unpack(s, storage)
            shards = [self.shards.pack(shard_kind, leaves) for shard_kind in self.shard_kinds(s)]
            return jax.tree.map(lambda *xs: jnp.stack(xs), *shards)

        return switch_stages(stage, range(self.gathered.num_stages), cut, storage)

    def _merge(self, stage: jax.Array, shards: Storage) -> Storage:
        def merge(s: int, shards: Storage) -> Storage:
            leaves: dict[str, jax.Array] = {}
            for replica, shard_kind in enumerate(self.shard_kinds(s)):
                leaves |= self.shards.unpack(
                    shard_kind, jax.tree.map(lambda x, r=replica: x[r], shards)
                )
            return self.gathered.pack(s, leaves)

        return switch_stages(stage, range(self.gathered.num_stages), merge, shards)


@dataclass(frozen=True)
class ZeroSharding:
    """A model's parameters in three dtypes, all cut into shards in one way.

    Attributes:
        master: Parameters between steps, in float32 in mixed precision, or as they are computed
            with where frozen.
        trained: Those of them that the optimiser updates; their mean gradients lie so, too.
        compute: Parameters in the dtype the layers compute in.
        grad_accum: Gradients in the dtype they are summed in.
    """

    master: ShardLayout
    trained: ShardLayout
    compute: ShardLayout
    grad_accum: ShardLayout

    @property
    def num_rows(self) -> int:
        """Rows of the global arrays: distinct shards of all stages."""
        return self.master.gathered.num_stages * self.master.num_shards

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The manual mesh axes along which shards differ."""
        return ("stage", "data") if self.master.num_shards > 1 else ("stage",)

    @property
    def row_spec(self) -> P:
        """Sharding of the first dim of the global arrays."""
        return P(self.row_axes) if len(self.row_axes) > 1 else P("stage")

    def gather_params(self, stage: jax.Array, shard_kind: jax.Array, shard: Storage) -> Storage:
        """Compute parameters of a stage, from the master shard of each of its replicas."""
        # Cast before the gather: the replicas then send half the bytes in mixed precision.
        return self.compute.gather(
            stage, _cast(self.master.shards, self.compute.shards, shard_kind, shard)
        )

    def reduce_gradients(
        self, stage: jax.Array, shard_kind: jax.Array, storage: Storage
    ) -> Storage:
        """The shard of a stage's gradients, summed over all replicas.

        It is laid out as trained parameters are.
        """
        # Summed in the accumulation dtype, which may be wider than that of the master parameters,
        # and cast once.
        return _cast(
            self.grad_accum.shards,
            self.trained.shards,
            shard_kind,
            self.grad_accum.reduce(stage, storage),
        )


def zero_sharding(
    params: ModelParams,
    optimizer: optax.GradientTransformation,
    num_shards: int,
    mesh: Mapping[str, int],
) -> ZeroSharding:
    """Choose how a model's parameters are cut into shards.

    `num_shards` is 1, or with ZeRO-1 the length of the `data` axis. Whole leaves are dealt out
    where the optimiser does not update element by element.
    """
    layouts = (
        params.master_layout,
        params.master_layout.cast(frozen=False),
        params.layout,
        params.grad_layout,
    )
    if num_shards == 1:
        return ZeroSharding(*(Replicated(layout) for layout in layouts))
    shards = [ByElements(layout, num_shards, mesh) for layout in layouts]
    # Asked of the layout that is updated for all: they differ in dtypes alone, and in what is
    # frozen.
    if not all(_is_elementwise(params, shards[1], s, optimizer) for s in range(len(params.stages))):
        return ZeroSharding(*(ByLeaves(x, num_shards, tuple(params.tied)) for x in layouts))
    return ZeroSharding(*shards)


def _is_elementwise(
    params: ModelParams, layout: ShardLayout, stage: int, optimizer: optax.GradientTransformation
) -> bool:
    paths = params.trained_paths[stage]
    whole, pieces = (
        unflatten_dict({path: each.struct_of(stage, name) for name, path in paths.items()})
        for each in (layout.gathered, layout.shards)
    )
    return is_elementwise(optimizer, whole, pieces)


def _packed_names(layout: Layout, stage: int) -> list[str]:
    return [name for name in layout.names(stage) if name not in layout.stacked]


def _cast(source: Layout, target: Layout, shard_kind: jax.Array, storage: Storage) -> Storage:
    """The same leaves in the dtypes of another layout."""
    stacked = {
        name: storage.stacked[name].astype(like.dtype) for name, like in target.stacked.items()
    }
    names = source.renamed_buffers(target)
    if names is not None:
        # Alike but for dtypes: no need to take them apart.
        return Storage(
            {
                new: storage.packed[old].astype(target.buffers[new].dtype)
                for old, new in names.items()
            },
            stacked,
        )

    def cast(f: int, packed: Buffers) -> Buffers:
        return target.pack_buffers(
            f, {name: source.get(f, name, Storage(packed)) for name in _packed_names(target, f)}
        )

    return Storage(
        switch_stages(shard_kind, range(target.num_stages), cast, storage.packed), stacked
    )


def _block_counts(spec: P, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Blocks along each dim of a leaf: one for each place of the axes it is sharded over."""
    return tuple(math.prod(mesh[axis] for axis in spec_axes(entry)) for entry in spec)


def _to_blocks(leaf: jax.Array, counts: Sequence[int]) -> jax.Array:
    """A leaf as its blocks, flattened: `[num_blocks, size]`."""
    split = leaf.reshape(
        [n for size, count in zip(leaf.shape, counts, strict=True) for n in (count, size // count)]
    )
    order = (*range(0, split.ndim, 2), *range(1, split.ndim, 2))
    return split.transpose(order).reshape(math.prod(counts), -1)


def _from_blocks(blocks: jax.Array, counts: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """The inverse of `_to_blocks`."""
    split = blocks.reshape(
        [*counts, *(size // count for size, count in zip(shape, counts, strict=True))]
    )
    order = [
        i
        for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True)
        for i in pair
    ]
    return split.transpose(order).reshape(shape)
