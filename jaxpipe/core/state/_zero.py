"""ZeRO-1: the part of its stage's parameters that each replica stores between steps.

The layers of a stage compute with its gathered storage. A shard is the part of the storage that one
device keeps between steps, together with the optimiser's state for that part. `gather` assembles
the storage from the shards of all replicas. `reduce` sums gradients over the replicas and returns
to each replica its shard of the sum.

What a shard has of a leaf depends on the leaf's slot in its stage's storage (`_layout.py`) and on
how shards are cut. A shard is stored in a layout too, in which the leaf has a slot again:

| slot      | leaves                            | `ByElements`     | `ByLeaves`                 |
|-----------|-----------------------------------|------------------|----------------------------|
| `Stacked` | alike on all stages               | piece, `Stacked` | whole or absent, as below  |
| `Flat`    | others                            | piece, `Flat`    | whole or absent, `Flat`    |
| `Sharded` | others that automatic axes divide | piece, `Sharded` | whole or absent, `Sharded` |

- A piece of a leaf that automatic axes divide is cut from each block; see `ByElements`. Pieces of
  stacked leaves need no conditional. With `ByLeaves` nothing is stacked, because a leaf may be on
  different replicas of different stages.
- `Replicated` shards are the storage itself, and all slots stay.
- Shards have the same kind if they have the same leaves at the same offsets: with `Replicated` and
  `ByElements` the kinds are the stages, with `ByLeaves` each stage and replica is a kind. Devices
  choose the program of their kind by `switch_stages` (`_switch.py`).
- Frozen leaves have the same slots, in separate buffers and only in layouts of all parameters. So
  the others have the same offsets in the layouts of trained parameters and of gradients.
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

from jaxpipe.distributed.topology import scatter_sum, sum_over
from jaxpipe.errors import ConfigError
from jaxpipe.layers import unflatten_dict
from jaxpipe.optim import params_needed_whole
from jaxpipe.programs.jaxpr import spec_axes

from ._layout import Layout, Storage, constrained
from ._params import ModelParams
from ._switch import switch_stages

Buffers = dict[str, jax.Array]
"""Packed buffers of one stage, by dtype."""


class ShardLayout(abc.ABC):
    """Division of all stages' storage into shards: one per replica, or one for all replicas.

    Shards are numbered by their kind. Devices whose shards have the same leaves at the same offsets
    have the same kind and run the same program. A kind belongs to one stage.

    Attributes:
        gathered: Layout of the whole storage, for each stage.
        shards: Layout of the shards, for each kind.
        num_shards: Number of shards of a stage; 1 if every replica stores all parameters.
        is_uniform: Whether all shards of a stage have the same kind, so that kinds are stages.
            Otherwise each shard has a different kind.
    """

    gathered: Layout
    shards: Layout
    num_shards: int
    is_uniform: bool

    def shard_kind(self, stage: Any, replica: Any) -> Any:
        """Return the kind of the shard at indices along `stage` and `data`, which may be traced."""
        return stage if self.is_uniform else stage * self.num_shards + replica

    def stage_of(self, shard_kind: int) -> int:
        """Return the stage that a kind of shard belongs to."""
        return shard_kind if self.is_uniform else shard_kind // self.num_shards

    def shard_kinds(self, stage: int) -> list[int]:
        """Return the kinds of a stage's shards."""
        return [
            shard_kind
            for shard_kind in range(self.shards.num_stages)
            if self.stage_of(shard_kind) == stage
        ]

    def shard_kind_of(self, stage: int, name: str) -> int:
        """Return the kind of a stage's shards that contain a leaf."""
        return next(
            shard_kind
            for shard_kind in self.shard_kinds(stage)
            if name in self.shards.names(shard_kind)
        )

    def rows_of(self, shard_kind: int) -> tuple[int, ...]:
        """Return the rows of global arrays that are shards of a kind, by stage, then replica."""
        return (
            tuple(range(shard_kind * self.num_shards, (shard_kind + 1) * self.num_shards))
            if self.is_uniform
            else (shard_kind,)
        )

    def block_counts(self, name: str) -> tuple[int, ...]:
        """Return the number of blocks along each dim of a leaf that is cut by blocks, or empty."""
        return ()

    def piece_of(self, name: str, leaf: jax.Array, replica: jax.Array) -> jax.Array:
        """Return the piece of a leaf in a replica's shard, for replicas that hold one."""
        return leaf

    @property
    def stages_of_shard_kinds(self) -> list[int]:
        """Stage of each kind of shard."""
        return [self.stage_of(shard_kind) for shard_kind in range(self.shards.num_stages)]

    @abc.abstractmethod
    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """Assemble the whole storage of this device's stage from the shards of its replicas."""

    @abc.abstractmethod
    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """Sum the whole storages of all replicas, and return this device's shard of the sum."""


class Replicated(ShardLayout):
    """Every replica stores the whole storage of its stage."""

    num_shards = 1
    is_uniform = True

    def __init__(self, gathered: Layout) -> None:
        self.gathered = self.shards = gathered

    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """Return the shard, which is the whole storage."""
        return shard

    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """Sum over the replicas."""
        return sum_over(storage, "data")


class _Sharded(ShardLayout):
    """Shards that differ between replicas."""

    def gather(self, stage: jax.Array, shard: Storage) -> Storage:
        """Gather all shards of the stage, then assemble its leaves."""
        return self._merge(stage, jax.tree.map(lambda x: jax.lax.all_gather(x, "data"), shard))

    def reduce(self, stage: jax.Array, storage: Storage) -> Storage:
        """Cut every leaf into pieces, then sum and scatter the pieces."""
        # One reduce-scatter. Together with the gather of the next step it sends as many bytes as
        # one all-reduce.
        return scatter_sum(self._cut(stage, storage), "data")

    @abc.abstractmethod
    def _cut(self, stage: jax.Array, storage: Storage) -> Storage:
        """Cut a whole storage into all its shards, with a leading dim `num_shards`."""

    @abc.abstractmethod
    def _merge(self, stage: jax.Array, shards: Storage) -> Storage:
        """Invert `_cut`."""


class ByElements(_Sharded):
    """Every leaf is cut into `num_shards` equal pieces, the last one padded with zeros.

    A piece of a leaf `[a, b]` has the shape `[1, k]`. It has as many dims as the leaf, so that
    masks by `ndim`, such as those that exclude biases from weight decay, treat the piece like the
    leaf. A leaf that is sharded over automatic axes is cut block by block, so that no element moves
    along these axes. A piece of a leaf with m blocks has the shape `[1, m * k]`, contains a piece
    of each block, and is sharded over the last dim.
    """

    is_uniform = True

    def __init__(self, gathered: Layout, num_shards: int, mesh: Mapping[str, int]) -> None:
        self.gathered = gathered
        self.num_shards = num_shards
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
        """See `ShardLayout.block_counts`: a block per index along the axes that shard the leaf."""
        return self._blocks.get(name, ())

    def piece_of(self, name: str, leaf: jax.Array, replica: jax.Array) -> jax.Array:
        """See `ShardLayout.piece_of`."""
        return self._to_pieces(name, leaf)[replica]

    def _piece(self, name: str, like: Any) -> jax.ShapeDtypeStruct:
        num_blocks = math.prod(self._blocks.get(name, ()))
        # Rounded up per block: `all_gather` and `psum_scatter` need pieces of equal size on all
        # replicas.
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

        # Stacked leaves have the same shape on all stages, so stage 0 stands for all.
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
    """Every leaf is whole in the shard of one replica, for optimisers such as LAMB that need that.

    Leaves are assigned in order of decreasing size to the replica with the fewest elements so far.
    """

    is_uniform = False

    def __init__(self, gathered: Layout, num_shards: int, tied: Sequence[str]) -> None:
        self.gathered = gathered
        self.num_shards = num_shards
        owners = [self._assign(s, tied) for s in range(gathered.num_stages)]
        # Not stacked: leaves that all stages have may be in the shards of different replicas.
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
        """Choose the replica that owns each leaf of a stage."""
        names = self.gathered.names(stage)
        used = [0] * self.num_shards
        # Tied leaves are assigned to the same replica on each stage that holds them, because a sum
        # over the stages is among devices of the same replica.
        owner = {name: i % self.num_shards for i, name in enumerate(tied)}
        sizes = {name: math.prod(self.gathered.struct_of(stage, name).shape) for name in names}
        frozen = self.gathered.frozen
        # Tied leaves come first, because their replicas are fixed and the others are balanced
        # around them. Frozen leaves come last, so that layouts without them, such as those of
        # gradients, assign the other leaves to the same replicas.
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
    """A model's parameters in three dtypes, all cut into shards in the same way.

    Attributes:
        master: Parameters between steps, in float32 in mixed precision. Frozen ones have the dtype
            that the layers compute in.
        trained: The parameters that the optimiser updates, and also the layout of their mean
            gradients.
        compute: Parameters in the dtype that the layers compute in.
        grad_accum: Gradients in the dtype in which they are summed.
    """

    master: ShardLayout
    trained: ShardLayout
    compute: ShardLayout
    grad_accum: ShardLayout

    @property
    def num_rows(self) -> int:
        """Number of rows of the global arrays: the distinct shards of all stages."""
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
        """Gather a stage's compute parameters from the master shards of its replicas."""
        # Cast before the gather, so that the replicas send half the bytes in mixed precision.
        return self.compute.gather(
            stage, _cast(self.master.shards, self.compute.shards, shard_kind, shard)
        )

    def reduce_gradients(
        self, stage: jax.Array, shard_kind: jax.Array, storage: Storage
    ) -> Storage:
        """Sum gradients over all replicas; return this device's shard, laid out like `trained`."""
        # Summed in the accumulation dtype, which may be wider than the dtype of the master
        # parameters, and cast once.
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
    """Choose how parameters are cut; `num_shards` is 1, or the size of `data` with ZeRO-1."""
    layouts = (
        params.master_layout,
        params.trained_layout,
        params.layout,
        params.grad_layout,
    )
    if num_shards == 1:
        return ZeroSharding(*(Replicated(layout) for layout in layouts))
    shards = [ByElements(layout, num_shards, mesh) for layout in layouts]
    # Checked for the layout that is updated, on behalf of all: they only differ in dtypes and in
    # frozen leaves.
    if any(_needs_whole(params, shards[1], s, optimizer) for s in range(len(params.stages))):
        # The optimiser does not update element by element.
        return ZeroSharding(*(ByLeaves(x, num_shards, tuple(params.tied)) for x in layouts))
    return ZeroSharding(*shards)


def _needs_whole(
    params: ModelParams, layout: ShardLayout, stage: int, optimizer: optax.GradientTransformation
) -> bool:
    paths = params.trained_paths[stage]
    whole, pieces = (
        unflatten_dict({path: each.struct_of(stage, name) for name, path in paths.items()})
        for each in (layout.gathered, layout.shards)
    )
    try:
        return bool(params_needed_whole(optimizer, whole, pieces))
    except ConfigError:
        # It fails with the pieces, such as one with a mask of a leaf's shape, or in any case; the
        # updater of whole leaves then raises.
        return True


def _packed_names(layout: Layout, stage: int) -> list[str]:
    return [name for name in layout.names(stage) if name not in layout.stacked]


def _cast(source: Layout, target: Layout, shard_kind: jax.Array, storage: Storage) -> Storage:
    """Convert leaves to the dtypes of another layout."""
    stacked = {
        name: storage.stacked[name].astype(like.dtype) for name, like in target.stacked.items()
    }
    names = source.renamed_buffers(target)
    if names is not None:
        # Only the dtypes differ, so whole buffers can be cast.
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
    """Return the number of blocks along each dim of a leaf: the size of the axes of its spec."""
    return tuple(math.prod(mesh[axis] for axis in spec_axes(entry)) for entry in spec)


def _to_blocks(leaf: jax.Array, counts: Sequence[int]) -> jax.Array:
    """Divide a leaf into flattened blocks, `[num_blocks, size]`."""
    split = leaf.reshape(
        [n for size, count in zip(leaf.shape, counts, strict=True) for n in (count, size // count)]
    )
    order = (*range(0, split.ndim, 2), *range(1, split.ndim, 2))
    return split.transpose(order).reshape(math.prod(counts), -1)


def _from_blocks(blocks: jax.Array, counts: Sequence[int], shape: Sequence[int]) -> jax.Array:
    """Invert `_to_blocks`."""
    split = blocks.reshape(
        [*counts, *(size // count for size, count in zip(shape, counts, strict=True))]
    )
    order = [
        i
        for pair in zip(range(len(shape)), range(len(shape), 2 * len(shape)), strict=True)
        for i in pair
    ]
    return split.transpose(order).reshape(shape)
