"""Layout of the leaves of all stages in one pytree of global arrays, with the stage as first dim.

A leaf that all stages have with the same shape and dtype is a separate array `[num_stages, ...]`.
Leaves that only some stages have are packed into one buffer `[num_stages, size]` per dtype, padded
to the stage that needs most: `shard_map` runs one program, so all devices hold arrays of the same
shapes. Both kinds of arrays are sharded over the `stage` axis, so a stage's part is only on its own
devices.

A leaf that is also sharded over automatic axes, such as `model`, keeps its dims, because a flat
buffer cannot be sharded like the leaf. If only some stages have the leaf, it shares an array with
leaves of the same shape and sharding on other stages, one leaf per stage.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Specs = Mapping[str, P]
"""Shardings over automatic axes by name, for the leaves that have one.

A spec has an entry for each dim.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Storage:
    """Arrays of one layout.

    The names of the fields are part of the names of arrays in checkpoints.

    Attributes:
        packed: Leaves that not all stages have: flat buffers by dtype, and sharded leaves.
        stacked: Leaves with separate arrays, by name.
    """

    packed: dict[str, Any]
    stacked: dict[str, Any] = field(default_factory=dict)


OptState = dict[str, Storage]
"""Optimiser state as it is stored: for each group of parameters its leaves.

Arrays are `[num_rows, ...]` between steps, and have no first dim inside a device's program.
"""


@dataclass(frozen=True)
class Stacked:
    """A leaf that is alike on all stages and has an array of its own."""

    name: str


@dataclass(frozen=True)
class Flat:
    """A leaf that is part of a flat buffer: `stop - start` consecutive elements."""

    buffer: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of the elements."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Sharded:
    """A leaf that keeps its dims, in a packed array that has one leaf per stage."""

    buffer: str
    shape: tuple[int, ...]


Slot = Stacked | Flat | Sharded
"""Where a leaf of a stage is; equal for leaves that one program can read on different stages."""


class Layout:
    """Layout of named leaves, stage by stage.

    The stages may be any family whose members have different leaves. A `Storage` has
    `stacked[name]` of shape `[num_stages, ...]` for leaves that are alike on all stages. For the
    others it has `packed[dtype]` of shape `[num_stages, size]`, and separate arrays for sharded
    leaves. Inside a stage's own program the first dim is absent.

    Buffers keep the order of a stage's leaves. Without `stack`, all leaves are in the buffers;
    without `specs`, nothing is sharded. `frozen` leaves have separate buffers, so that they do not
    change the offsets of the others.

    Attributes:
        specs: Shardings of the leaves of all stages, if a name means the same on all stages.
        buffers: Shapes and dtypes of the packed buffers of a stage.
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, jax.ShapeDtypeStruct]],
        *,
        stack: bool = True,
        specs: Sequence[Specs] = (),
        frozen: Collection[str] = (),
    ) -> None:
        self.frozen = frozenset(frozen)
        self.num_stages = len(stages)
        self._specs = tuple(specs) or tuple({} for _ in stages)
        self.specs = {name: spec for of_stage in self._specs for name, spec in of_stage.items()}
        first = stages[0] if stack and stages else {}
        self.stacked = {
            name: jax.ShapeDtypeStruct(like.shape, like.dtype)
            for name, like in first.items()
            if all(name in other and _same(other[name], like) for other in stages)
            # An array for all stages has a single sharding.
            and len({of_stage.get(name) for of_stage in self._specs}) == 1
        }
        self._names = [tuple(stage) for stage in stages]
        self.buffers: dict[str, jax.ShapeDtypeStruct] = {}
        self._buffer_specs: dict[str, P] = {}
        self._slots = [self._place(*pair) for pair in zip(stages, self._specs, strict=True)]

    def _place(self, stage: Mapping[str, jax.ShapeDtypeStruct], specs: Specs) -> dict[str, Slot]:
        """Find slots for a stage's leaves, in existing or new buffers."""
        used: dict[str, int] = {}
        slots: dict[str, Slot] = {}
        for name, like in stage.items():
            shape = tuple(like.shape)
            spec = specs.get(name)
            if name in self.stacked:
                slots[name] = Stacked(name)
                continue
            kind = like.dtype.name if spec is None else _kind(like, spec)
            kind = f"frozen.{kind}" if name in self.frozen else kind
            # Counted in elements for flat buffers, and in arrays for sharded leaves, which have one
            # array each.
            start = used.get(kind, 0)
            used[kind] = end = start + (math.prod(shape) if spec is None else 1)
            if spec is None:
                slots[name] = Flat(kind, start, shape)
                size = max(end, math.prod(self.buffers[kind].shape) if kind in self.buffers else 0)
                self.buffers[kind] = jax.ShapeDtypeStruct((size,), like.dtype)
            else:
                # The n-th leaf of this shape and sharding on each stage is in the n-th such array.
                buffer = f"{kind}.{start}"
                slots[name] = Sharded(buffer, shape)
                self.buffers[buffer] = jax.ShapeDtypeStruct(shape, like.dtype)
                self._buffer_specs[buffer] = spec
        return slots

    def renamed_buffers(self, other: "Layout") -> Mapping[str, str] | None:
        """Map the buffers to those of a layout with the same leaves. None: they differ."""
        found: dict[str, str] = {}
        for mine, theirs in zip(self._slots, other._slots, strict=True):
            for name, slot in mine.items():
                its = theirs[name]
                if isinstance(slot, Stacked) != isinstance(its, Stacked):
                    return None
                if isinstance(slot, Stacked) or isinstance(its, Stacked):
                    continue
                same = found.setdefault(slot.buffer, its.buffer)
                if dataclasses.replace(slot, buffer=same) != its:
                    # For example, leaves of different dtypes here share a dtype there.
                    return None
        return found if len(set(found.values())) == len(found) else None

    def names(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's leaves."""
        return self._names[stage]

    def struct_of(self, stage: int, name: str) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of one leaf of a stage."""
        slot = self.slot(stage, name)
        if isinstance(slot, Stacked):
            return self.stacked[name]
        return jax.ShapeDtypeStruct(slot.shape, self.buffers[slot.buffer].dtype)

    def struct(self) -> Storage:
        """Return shapes and dtypes of one stage's storage, without the stage dim."""
        return Storage(dict(self.buffers), dict(self.stacked))

    def spec(self) -> Storage:
        """Return the shardings of one stage's storage over automatic axes, for each array."""
        stacked = {name: self.specs.get(name, P()) for name in self.stacked}
        return Storage({name: self._buffer_specs.get(name, P()) for name in self.buffers}, stacked)

    def constrain(self, storage: Storage) -> Storage:
        """Shard each array of a storage as laid out. Call this where a program makes arrays."""
        # Zeros have no sharding, and XLA might replicate the values that are added to them.
        return jax.tree.map(constrained, storage, self.spec())

    def zeros(self) -> Storage:
        """Make one stage's storage, filled with zeros."""
        return self.constrain(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.struct()))

    def slot(self, stage: int, name: str) -> Slot:
        """Return where a leaf of a stage is."""
        return self._slots[stage][name]

    def span(self, stage: int, name: str) -> tuple[str, int, int]:
        """Return the name of a leaf's array, and its start and end in a flattened row."""
        match self.slot(stage, name):
            case Stacked():
                return f"stacked/{name}", 0, math.prod(as_words(self.stacked[name]).shape)
            case Sharded(buffer, shape):
                return f"packed/{buffer}", 0, math.prod(shape)
            case Flat() as slot:
                return f"packed/{slot.buffer}", slot.start, slot.stop

    def get(self, stage: int, name: str, storage: Storage) -> jax.Array:
        """Return one leaf of a stage, from that stage's storage."""
        match self.slot(stage, name):
            case Stacked():
                return storage.stacked[name]
            case Sharded(buffer):
                return storage.packed[buffer]
            case Flat() as slot:
                # Both sides of every slice of a flat buffer are constrained to be whole. If the
                # leaf's neighbours are sharded, XLA would otherwise shard the buffer too, and move
                # elements between devices.
                leaf = _whole(storage.packed[slot.buffer])[slot.start : slot.stop]
                return _whole(leaf).reshape(slot.shape)

    def unpack(self, stage: int, storage: Storage) -> dict[str, jax.Array]:
        """Return all leaves of a stage by name."""
        return {name: self.get(stage, name, storage) for name in self._names[stage]}

    def pack_buffers(
        self, stage: int, leaves: Mapping[str, jax.Array], dtypes: Mapping[str, Any] | None = None
    ) -> dict[str, jax.Array]:
        """Make a stage's packed buffers, in their own or other dtypes; missing leaves are zero."""
        buffers = {}
        given = [(slot, leaves[n]) for n, slot in self._slots[stage].items() if n in leaves]
        for buffer, own in self.buffers.items():
            dtype = (dtypes or {}).get(buffer, own.dtype)
            if buffer in self._buffer_specs:
                sharded = [
                    _as(leaf, dtype)
                    for slot, leaf in given
                    if isinstance(slot, Sharded) and slot.buffer == buffer
                ] or [jnp.zeros(own.shape, dtype)]
                buffers[buffer] = constrained(sharded[0], self._buffer_specs[buffer])
                continue
            pieces = []
            end = 0
            # In the order of their offsets, which `_place` assigned. A gap between two leaves means
            # that a leaf is missing.
            for slot, leaf in given:
                if isinstance(slot, Flat) and slot.buffer == buffer:
                    pieces += [jnp.zeros((slot.start - end,), dtype)] if slot.start > end else []
                    pieces.append(_whole(_as(leaf, dtype)).reshape(-1))
                    end = slot.stop
            whole = (
                jnp.concatenate(pieces)
                if len(pieces) > 1
                else (pieces or [jnp.zeros((0,), dtype)])[0]
            )
            missing = own.shape[0] - end
            buffers[buffer] = _whole(
                jax.lax.pad(whole, jnp.zeros((), dtype), [(0, missing, 0)]) if missing else whole
            )
        return buffers

    def pack(self, stage: int, leaves: Mapping[str, jax.Array]) -> Storage:
        """Make a stage's storage from all its leaves."""
        stacked = {name: _as(leaves[name], like.dtype) for name, like in self.stacked.items()}
        return Storage(self.pack_buffers(stage, leaves), stacked)

    def put(self, stage: int, storage: Storage, changed: Mapping[str, jax.Array]) -> Storage:
        """Replace some leaves in a stage's storage."""
        stacked = dict(storage.stacked)
        packed = dict(storage.packed)
        for name, value in changed.items():
            match self.slot(stage, name):
                case Stacked():
                    stacked[name] = value
                case Sharded(buffer):
                    packed[buffer] = value
                case Flat(buffer, start):
                    # Not with `at`: for a slice that covers the whole buffer it makes a scatter
                    # with indices of size zero, on which the compiler of JAX 0.11.2 crashes.
                    packed[buffer] = jax.lax.dynamic_update_slice(
                        packed[buffer], _whole(value).reshape(-1), (start,)
                    )
        return Storage(packed, stacked)


def select_arrays(layout: Layout, storage: Storage) -> Storage:
    """Select the arrays of a layout from a storage that also has others."""
    stacked = {name: storage.stacked[name] for name in layout.stacked}
    return Storage({name: storage.packed[name] for name in layout.buffers}, stacked)


def is_key(dtype: Any) -> bool:
    """True if this is the dtype of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_words(struct: Any) -> Any:
    """Return shape and dtype of an array, or of the keys' words if it holds PRNG keys."""
    return jax.eval_shape(jax.random.key_data, struct) if is_key(struct.dtype) else struct


def constrained(leaf: jax.Array, spec: P) -> jax.Array:
    """Shard an array inside a program over automatic axes; whole along dims without an entry."""
    # Also needed for arrays that are not sharded. If the choice is left to XLA, it may shard an
    # array because its neighbours are sharded. Gathering it again costs collectives, which may
    # deadlock inside the branches of a conditional.
    return jax.lax.with_sharding_constraint(leaf, spec) if has_automatic_axes() else leaf


def has_automatic_axes() -> bool:
    """True if the current mesh has automatic axes."""
    return AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types


def _whole(leaf: jax.Array) -> jax.Array:
    return constrained(leaf, P())


def _kind(like: jax.ShapeDtypeStruct, spec: P) -> str:
    """Return a name that is equal for sharded leaves that can share an array."""
    axes = [
        "+".join(axis) if isinstance(axis, tuple) else axis if isinstance(axis, str) else "_"
        for axis in spec
    ]
    # Part of the names of arrays in checkpoints.
    return f"{like.dtype.name}.{'x'.join(map(str, like.shape))}.{'-'.join(axes)}"


def _as(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _same(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype
