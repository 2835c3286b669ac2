"""Initial parameters and collections, drawn on the devices that store them.

No host has to hold them.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import Path, PyTree
from jaxpipe.distributed import log
from jaxpipe.jaxpr import (
    flatten,
    needed_for,
    program_key,
    without_mesh,
)
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, split_path

from ._layout import is_key
from ._made import MadeField, MadeLeaf
from ._recipe import Recipe, fault_of
from ._zero import ShardLayout


@dataclass(frozen=True)
class _Slot:
    """One leaf among those that a run makes, with its name on the first stage that makes it."""

    leaf: MadeLeaf
    target: int  # index of the array that the leaf is written into
    is_flat: bool  # whether that array is a flat buffer, instead of only the leaf


@dataclass
class _Round:
    """One run of a recipe, in which every device makes at most one layer."""

    slots: tuple[_Slot, ...]
    targets: tuple[str, ...]  # names of the arrays that the leaves are written into
    # For each kind of shard the layer, and the offset of each slot in a flat buffer.
    layers: dict[int, tuple[int, list[int]]]


class StageInit:
    """Makes initial parameters and collections.

    The values are bitwise equal to those of `PipelineModule.init` with the same key on one device
    of that kind, for any number of stages and any sharding of the leaves. A layer is made on the
    devices that store it. Each of them holds the whole layer until it has cut out its shard, and
    then the next layer is made. Equal layers are compiled once.

    A layer is made in host memory instead, one layer at a time, if its initialiser does more than
    compute: if it captures arrays (for example numpy arrays), has side effects, calls back into
    Python, or draws with another generator than threefry, whose numbers depend on the device.
    """

    def __init__(self, module: PipelineModule, trace: ModelTrace, key: jax.Array) -> None:
        self._module = module
        self._trace = trace
        self._key = key
        self._owners = trace.owners()
        self._indices = {named.name: named.index for named in module.layers}
        self._recipes: dict[int, Recipe] = {}
        self._numbers: dict[Hashable, int] = {}
        self._programs: dict[Hashable, Callable[..., Any]] = {}
        self._on_host: dict[int, Callable[..., tuple[PyTree, PyTree]]] = {}

    def draw(
        self,
        made: MadeField,
        structs: Mapping[str, Any],
        place_on_host: Callable[[Sequence[str]], Mapping[str, jax.Array]],
        keys: Sequence[str],
    ) -> dict[str, jax.Array]:
        """Make the arrays of a state's field, by name. All processes must call this."""
        on_host = [key for key in keys if self._recipe(self._maker(key)[0]).fault]
        self._report([self._maker(key)[0] for key in on_host], made.field)
        # `place_on_host` makes the arrays that contain these leaves from values in host memory.
        arrays = dict(place_on_host(on_host) if on_host else {})
        left = {name: like for name, like in structs.items() if name not in arrays}
        arrays |= _zeros(left)
        for one in self._rounds(made):
            self._run(one, made, arrays)
            # Otherwise many rounds would run concurrently, with the leaves of all of them in memory
            # in addition to the state.
            jax.block_until_ready([arrays[name] for name in one.targets])
        return arrays

    def source(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yield leaves in host memory, by their keys in the catalog."""
        # The leaves of a layer are made together, once per call.
        made: dict[int, dict[tuple[str, Path], Any]] = {}
        for key in keys:
            index, name = self._maker(key)
            if index not in made:
                made[index] = self._make_on_host(index)
            yield key, made[index][name]

    def _maker(self, key: str) -> tuple[int, tuple[str, Path]]:
        """Return the layer that makes a leaf of the catalog, and the leaf's name in the layer."""
        field, *path = split_path(key)
        if field == "params":
            index, local = self._owners[tuple(path)]
            return index, (field, local)
        return self._indices[path[0]], (field, tuple(path[1:]))

    def _report(self, indices: Sequence[int], field: str) -> None:
        names = list(dict.fromkeys(self._module.layers[index].name for index in indices))
        if names:
            fault = self._recipe(indices[0]).fault
            more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
            log(
                logging.INFO,
                "%s of %s%s are made in host memory: the initialiser %s",
                field,
                names[0],
                more,
                fault,
            )

    def _recipe(self, index: int) -> Recipe:
        first = self._trace.firsts[index]
        if first not in self._recipes:
            names: list[tuple[str, Path]] = []

            def make(key: jax.Array) -> list[Any]:
                leaves = self._make(first, key)
                names[:] = leaves
                return list(leaves.values())

            like = jax.eval_shape(lambda: self._layer_key(first))
            closed = jax.make_jaxpr(make)(like)
            program = without_mesh(flatten(closed))
            leaves = dict(zip(names, program.outputs, strict=True))
            part = needed_for(program, program.outputs)
            number = self._numbers.setdefault(
                (program_key(closed), tuple(names)), len(self._numbers)
            )
            self._recipes[first] = Recipe(number, program, leaves, fault_of(program, part))
        return self._recipes[first]

    def _make(self, index: int, key: jax.Array) -> dict[tuple[str, Path], Any]:
        made = zip(
            ("params", "collections"), self._module.init_layer(index, self._trace, key), strict=True
        )
        return {
            (field, path): leaf
            for field, tree in made
            for path, leaf in flatten_dict(tree or {}).items()
        }

    def _make_on_host(self, index: int) -> dict[tuple[str, Path], Any]:
        first = self._trace.firsts[index]
        with jax.default_device(_host()):
            run = self._on_host.setdefault(
                first, jax.jit(lambda key: list(self._make(first, key).values()))
            )
            return dict(
                zip(
                    self._recipe(index).leaves,
                    run(jax.device_put(self._layer_key(index), _host())),
                    strict=True,
                )
            )

    def _layer_key(self, index: int) -> jax.Array:
        return self._module.layer_key(self._key, index)

    def _rounds(self, made: MadeField) -> list[_Round]:
        """Plan the runs that make all leaves, each layer on every device that stores part of it."""
        rounds: dict[Hashable, _Round] = {}
        layout = made.sharding.shards
        for shard_kind, leaves in enumerate(made.shard_kinds):
            by_layer: dict[int, list[MadeLeaf]] = {}
            for leaf in leaves:
                if not self._recipe(leaf.index).fault:
                    by_layer.setdefault(leaf.index, []).append(leaf)
            numbers: dict[Hashable, int] = {}
            for index, group in by_layer.items():
                arrays, offsets, _, are_flat = zip(
                    *(layout.span(shard_kind, leaf.name) for leaf in group), strict=True
                )
                targets = tuple(dict.fromkeys(f"{made.field}/{array}" for array in arrays))
                at = [targets.index(f"{made.field}/{array}") for array in arrays]
                slots = tuple(map(_Slot, group, at, are_flat))
                kind = self._recipe(index).number, tuple(leaf.local for leaf in group), arrays
                # A round has the n-th layer of this kind on each device. Stages draw in parallel,
                # so that drawing all layers takes as long as drawing those of one stage.
                number = numbers[kind] = numbers.get(kind, -1) + 1
                one = rounds.setdefault((kind, number), _Round(slots, targets, {}))
                one.layers[shard_kind] = index, list(offsets)
        return list(rounds.values())

    def _run(self, one: _Round, made: MadeField, arrays: dict[str, jax.Array]) -> None:
        targets = [arrays[name] for name in one.targets]
        sharding = made.sharding
        rows = [
            shard_kind
            for stage in range(sharding.gathered.num_stages)
            for shard_kind in _shard_kinds_of_rows(sharding, stage)
        ]
        keys = {shard_kind: self._layer_key(index) for shard_kind, (index, _) in one.layers.items()}
        words = {
            shard_kind: np.asarray(jax.random.key_data(key) if is_key(key.dtype) else key)
            for shard_kind, key in keys.items()
        }
        some = next(iter(one.layers))
        nothing = np.zeros_like(words[some])
        none = (0, [0] * len(one.slots))
        at_rows = NamedSharding(cast("NamedSharding", targets[0].sharding).mesh, made.rows)

        def by_row(values: list[Any], dtype: Any = None) -> jax.Array:
            whole = np.asarray(values, dtype)
            return jax.make_array_from_callback(whole.shape, at_rows, lambda at: whole[at])

        # One row for every device, even if it has nothing to draw: whether a device draws is data,
        # so that all devices run one program.
        is_here = by_row([shard_kind in one.layers for shard_kind in rows])
        offsets = by_row([one.layers.get(shard_kind, none)[1] for shard_kind in rows], np.int32)
        recipe = self._recipe(one.layers[some][0])
        impl = jax.random.key_impl(keys[some]) if is_key(keys[some].dtype) else None
        draw = self._drawing(recipe, one.slots, made, cast("Mesh", at_rows.mesh), impl)
        leaves = draw(by_row([words.get(shard_kind, nothing) for shard_kind in rows]), is_here)
        put = self._putting(
            recipe, one.slots, made, [cast("NamedSharding", x.sharding) for x in targets]
        )
        arrays.update(zip(one.targets, put(targets, leaves, is_here, offsets), strict=True))

    def _drawing(
        self, recipe: Recipe, slots: Sequence[_Slot], made: MadeField, mesh: Mesh, impl: Any
    ) -> Callable[..., list[jax.Array]]:
        """Return the jitted program that makes whole leaves on each device that stores some."""
        names = [(made.field, slot.leaf.local) for slot in slots]

        def draw(words: jax.Array, is_here: jax.Array) -> list[jax.Array]:
            def drawn() -> list[jax.Array]:
                leaves = recipe.run(
                    words[0] if impl is None else jax.random.wrap_key_data(words[0], impl=impl),
                    names,
                )
                return [
                    jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf for leaf in leaves
                ]

            def zeros() -> list[jax.Array]:
                return [jnp.zeros(like.shape, like.dtype) for like in jax.eval_shape(drawn)]

            # All devices run this program, but only those that store part of the layer draw it.
            return [leaf[None] for leaf in jax.lax.cond(is_here[0], drawn, zeros)]

        # Every axis is manual and nothing is cut here, so each device runs the program of a single
        # device. If XLA partitioned the work, or fused it with its consumers, it would multiply
        # constants in another order, and the last bits would differ (JAX 0.10, CPU).
        rows = made.rows
        mapped = jax.shard_map(
            draw, mesh=mesh, in_specs=rows, out_specs=P(mesh.axis_names), check_vma=False
        )
        return self._programs.setdefault((recipe.number, tuple(names)), jax.jit(mapped))

    def _putting(
        self,
        recipe: Recipe,
        slots: Sequence[_Slot],
        made: MadeField,
        shardings: list[NamedSharding],
    ) -> Callable[..., list[jax.Array]]:
        """Return the jitted program that writes each device's part of drawn leaves into arrays."""
        sharding = made.sharding
        specs = [one.spec for one in shardings]

        def cut(slot: _Slot, leaf: jax.Array, target: jax.Array) -> jax.Array:
            stage = jax.lax.axis_index("stage")
            dim = slot.leaf.stage_dim
            leaf = leaf if dim is None else _block(leaf, dim, stage, sharding.gathered.num_stages)
            piece = sharding.piece_of(slot.leaf.name, leaf, jax.lax.axis_index("data")).astype(
                target.dtype
            )
            if slot.is_flat:
                return piece.reshape(-1, *target.shape[1:])
            for dim, axes in enumerate(specs[slot.target][1:]):
                if axes is not None:
                    piece = _block(piece, dim, jax.lax.axis_index(axes), jax.lax.axis_size(axes))
            return piece

        def put(
            targets: list[jax.Array],
            leaves: list[jax.Array],
            is_here: jax.Array,
            offsets: jax.Array,
        ) -> list[jax.Array]:
            def write(_: Any, arrays: list[jax.Array]) -> list[jax.Array]:
                written = list(arrays)
                for i, (slot, leaf) in enumerate(zip(slots, leaves, strict=True)):
                    old = written[slot.target]
                    piece = cut(slot, leaf[0], old)
                    if slot.is_flat:
                        piece = jax.lax.dynamic_update_slice_in_dim(old, piece, offsets[0, i], 0)
                    written[slot.target] = piece
                return written

            # A loop that runs zero or one time: it writes its carry in place, and devices without
            # the layer leave it unchanged.
            filled = jax.lax.fori_loop(
                0, is_here[0].astype(jnp.int32), write, [target[0] for target in targets]
            )
            return [array[None] for array in filled]

        described = [
            (
                slot.leaf.local,
                slot.leaf.stage_dim,
                slot.target,
                slot.is_flat,
                sharding.block_counts(slot.leaf.name),
            )
            for slot in slots
        ]
        mesh = shardings[0].mesh
        rows = made.rows
        in_specs = (specs, P(mesh.axis_names), rows, rows)
        mapped = jax.shard_map(put, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        # Donated, so that the arrays are never in memory twice while they are filled.
        jitted = jax.jit(mapped, out_shardings=shardings, donate_argnums=(0,))
        # All rounds of a recipe whose leaves are stored alike share one program.
        return self._programs.setdefault(
            (recipe.number, tuple(described), tuple(shardings)), jitted
        )


def _shard_kinds_of_rows(sharding: ShardLayout, stage: int) -> list[int]:
    """Return the kind of shard of each row of a stage."""
    return [int(sharding.shard_kind(stage, replica)) for replica in range(sharding.num_shards)]


def _block(leaf: jax.Array, dim: int, index: jax.Array, count: int) -> jax.Array:
    """Return one of `count` equal blocks of a leaf along a dim."""
    size = leaf.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(leaf, index * size, size, dim)


def _zeros(structs: Mapping[str, Any]) -> dict[str, jax.Array]:
    shardings = {name: like.sharding for name, like in structs.items()}

    def make() -> dict[str, jax.Array]:
        return {name: jnp.zeros(like.shape, like.dtype) for name, like in structs.items()}

    return jax.jit(make, out_shardings=shardings)() if structs else {}


def _host() -> Any:
    """Return a CPU device, or the default device if JAX has no CPU backend."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
