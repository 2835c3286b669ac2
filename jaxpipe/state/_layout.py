"""Layout of the leaves of all stages in one pytree of global arrays, each with the stage as its first dim.

A leaf that every stage has alike is an array `[num_stages, ...]` of its own. What only some stages have lies in one
buffer `[num_stages, size]` per dtype, padded to the stage that needs most: `shard_map` runs one program, so all
devices hold arrays of the same shapes. Both are sharded over the `stage` axis, so a stage's arrays are on its own
devices alone.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

_SHARDED = "/model"
"""End of the names of buffers whose leaves are sharded over the `model` axis."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Storage:
    """Arrays of one layout.

    The names of the fields are part of the names of arrays in checkpoints.

    Attributes:
        packed: The buffers, by dtype.
        stacked: The leaves that have arrays of their own, by name.
    """

    packed: dict[str, Any]
    stacked: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Slot:
    """The elements of a packed buffer that are a leaf."""

    buffer: str
    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


class Layout:
    """Layout of named leaves, stage by stage; in place of stages, any family whose members differ in leaves.

    A `Storage` has `stacked[name]` of shape `[num_stages, ...]` for leaves that all stages have alike and
    `packed[dtype]` of shape `[num_stages, size]` for the rest. Inside a stage's own program the first dim is absent.

    Args:
        stages: For each stage its leaves by name, as shapes and dtypes. The order is kept inside the buffers.
        stack: Give a leaf that all stages have alike an array of its own; else all lie in the buffers.
        sharded: Leaves that are sharded over the `model` axis; they have buffers of their own.
    """

    def __init__(
        self,
        stages: Sequence[Mapping[str, jax.ShapeDtypeStruct]],
        *,
        stack: bool = True,
        sharded: Collection[str] = (),
    ) -> None:
        self.num_stages, self.sharded = len(stages), frozenset(sharded)
        first = stages[0] if stack and stages else {}
        self.stacked = {
            name: jax.ShapeDtypeStruct(like.shape, like.dtype)
            for name, like in first.items()
            if all(name in other and _same(other[name], like) for other in stages)
        }
        self._slots: list[dict[str, _Slot]] = []
        self._names = [tuple(stage) for stage in stages]
        self.packed_sizes: dict[str, int] = {}
        for stage in stages:
            used: dict[str, int] = {}
            slots = {}
            for name, like in stage.items():
                if name not in self.stacked:
                    buffer = like.dtype.name + (_SHARDED if name in self.sharded else "")
                    slots[name] = _Slot(buffer, used.get(buffer, 0), tuple(like.shape))
                    used[buffer] = slots[name].end
            self._slots.append(slots)
            for buffer, size in used.items():
                self.packed_sizes[buffer] = max(size, self.packed_sizes.get(buffer, 0))

    def cast(self, change: Callable[[Any], Any]) -> "Layout":
        """The layout of the same leaves in other dtypes.

        Args:
            change: Gives the new shape and dtype of a leaf from the present one; dtypes alone may differ.
        """
        stages = [{name: change(self.struct_of(s, name)) for name in names} for s, names in enumerate(self._names)]
        return Layout(stages, sharded=self.sharded)

    def packed_names(self, stage: int) -> list[str]:
        """The leaves of a stage that lie in its buffers."""
        return list(self._slots[stage])

    def names(self, stage: int) -> tuple[str, ...]:
        """The leaves of a stage."""
        return self._names[stage]

    def struct_of(self, stage: int, name: str) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one leaf of a stage."""
        if name in self.stacked:
            return self.stacked[name]
        slot = self._slots[stage][name]
        return jax.ShapeDtypeStruct(slot.shape, dtype_of(slot.buffer))

    def struct(self) -> Storage:
        """Shapes and dtypes of one stage's storage, without the stage dim."""
        packed = {name: jax.ShapeDtypeStruct((size,), dtype_of(name)) for name, size in self.packed_sizes.items()}
        return Storage(packed, dict(self.stacked))

    def zeros(self) -> Storage:
        """One stage's storage, all zeros."""
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.struct())

    def slot(self, stage: int, name: str) -> object:
        """Slot of a leaf; equal for leaves that one program can read on different stages."""
        return name if name in self.stacked else self._slots[stage][name]

    def span(self, stage: int, name: str) -> tuple[str, int, int]:
        """Name of the array that a leaf lies in, and where in a row of it the leaf begins and ends."""
        if name in self.stacked:
            return f"stacked/{name}", 0, math.prod(as_words(self.stacked[name]).shape)
        slot = self._slots[stage][name]
        return f"packed/{slot.buffer}", slot.offset, slot.end

    def get(self, stage: int, name: str, storage: Storage) -> jax.Array:
        """One leaf of a stage, from that stage's storage."""
        if name in self.stacked:
            return storage.stacked[name]
        slot = self._slots[stage][name]
        return storage.packed[slot.buffer][slot.offset : slot.end].reshape(slot.shape)

    def unpack(self, stage: int, storage: Storage) -> dict[str, jax.Array]:
        """All leaves of a stage by name."""
        return {name: self.get(stage, name, storage) for name in self._names[stage]}

    def pack_buffers(self, stage: int, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """A stage's packed buffers; leaves that are not given are zero."""
        buffers = {}
        for buffer, size in self.packed_sizes.items():
            dtype = dtype_of(buffer)
            pieces, end = [], 0
            for name, slot in self._slots[stage].items():
                if slot.buffer == buffer and name in leaves:
                    pieces += [jnp.zeros((slot.offset - end,), dtype)] if slot.offset > end else []
                    pieces.append(_as(leaves[name], dtype).reshape(-1))
                    end = slot.end
            whole = jnp.concatenate(pieces) if len(pieces) > 1 else (pieces or [jnp.zeros((0,), dtype)])[0]
            buffers[buffer] = jax.lax.pad(whole, jnp.zeros((), dtype), [(0, size - end, 0)]) if size > end else whole
        return buffers

    def pack(self, stage: int, leaves: Mapping[str, jax.Array]) -> Storage:
        """A stage's storage from all its leaves."""
        stacked = {name: _as(leaves[name], like.dtype) for name, like in self.stacked.items()}
        return Storage(self.pack_buffers(stage, leaves), stacked)

    def put(self, stage: int, storage: Storage, changed: Mapping[str, jax.Array]) -> Storage:
        """A stage's storage with some leaves replaced."""
        stacked, packed = dict(storage.stacked), dict(storage.packed)
        for name, value in changed.items():
            if name in self.stacked:
                stacked[name] = value
            else:
                slot = self._slots[stage][name]
                packed[slot.buffer] = packed[slot.buffer].at[slot.offset : slot.end].set(value.reshape(-1))
        return Storage(packed, stacked)

    def by_sharding(self, storage: Storage) -> tuple[Storage, Storage]:
        """A storage in two: what all ranks of the `model` axis hold alike, and what is sharded over it."""

        def half(is_sharded: bool) -> Storage:
            stacked = {name: x for name, x in storage.stacked.items() if (name in self.sharded) == is_sharded}
            packed = {name: x for name, x in storage.packed.items() if name.endswith(_SHARDED) == is_sharded}
            return Storage(packed, stacked)

        return half(False), half(True)


def is_key(dtype: Any) -> bool:
    """True if an array of this dtype holds keys of random numbers."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_words(struct: Any) -> Any:
    """Shape and dtype as plain numbers: those of a key's words where it holds keys."""
    return jax.eval_shape(jax.random.key_data, struct) if is_key(struct.dtype) else struct


def dtype_of(buffer: str) -> Any:
    """The dtype of a packed buffer, from its name."""
    return jnp.dtype(buffer.removesuffix(_SHARDED))


def _as(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _same(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> bool:
    return tuple(a.shape) == tuple(b.shape) and a.dtype == b.dtype
