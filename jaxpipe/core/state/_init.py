"""Initial parameters and collections, drawn on the devices that store them.

No host has to hold them.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed import log
from jaxpipe.errors import counted
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, split_path
from jaxpipe.programs.jaxpr import (
    flatten,
    needed_for,
    program_key,
    without_mesh,
)

from ._host import from_words, words_of
from ._layout import Flat
from ._made import MadeField, MadeLeaf
from ._recipe import Recipe, fault_of
from ._zero import ShardLayout


@dataclass(frozen=True)
class _Target:
    """What a run writes one leaf of a layer into; equal if one program can write both leaves."""

    name: str = field(compare=False)  # in the layout, on the first stage that makes it
    local: Path  # inside the layer
    stage_dim: int | None
    block_counts: tuple[int, ...]
    number: int  # of the array, among those of the run
    is_flat: bool  # whether that array is a flat buffer, instead of only the leaf


@dataclass
class _Round:
    """One run of a recipe, in which every device makes at most one layer."""

    recipe: Recipe
    arrays: tuple[str, ...]  # names of the arrays that the leaves are written into
    targets: tuple[_Target, ...]
    # For each kind of shard the layer, and the offset of each leaf in a flat buffer.
    layers: dict[int, tuple[int, list[int]]] = field(default_factory=dict)


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
            jax.block_until_ready([arrays[name] for name in one.arrays])
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
            more = f" and {counted(len(names) - 1, 'more layer')}" if len(names) > 1 else ""
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
                spans = [layout.span(shard_kind, leaf.name) for leaf in group]
                arrays = tuple(dict.fromkeys(f"{made.field}/{array}" for array, *_ in spans))
                targets = tuple(
                    _Target(
                        leaf.name,
                        leaf.local,
                        leaf.stage_dim,
                        made.sharding.block_counts(leaf.name),
                        arrays.index(f"{made.field}/{array}"),
                        isinstance(layout.slot(shard_kind, leaf.name), Flat),
                    )
                    for leaf, (array, *_) in zip(group, spans, strict=True)
                )
                recipe = self._recipe(index)
                kind = recipe.number, arrays, targets
                # A round has the n-th layer of this kind on each device. Stages draw in parallel,
                # so that drawing all layers takes as long as drawing those of one stage.
                number = numbers[kind] = numbers.get(kind, -1) + 1
                one = rounds.setdefault((kind, number), _Round(recipe, arrays, targets))
                one.layers[shard_kind] = index, [start for _, start, _ in spans]
        return list(rounds.values())

    def _run(self, one: _Round, made: MadeField, arrays: dict[str, jax.Array]) -> None:
        targets = [arrays[name] for name in one.arrays]
        shardings = [cast("NamedSharding", x.sharding) for x in targets]
        at_rows = NamedSharding(shardings[0].mesh, made.rows)
        keys = {shard_kind: self._layer_key(index) for shard_kind, (index, _) in one.layers.items()}
        words = {shard_kind: np.asarray(words_of(key)) for shard_kind, key in keys.items()}
        some = next(iter(keys))

        # One row for every device, even if it has nothing to draw: whether a device draws is data,
        # so that all devices run one program.
        def by_row(values: Mapping[int, Any], otherwise: Any, dtype: Any = None) -> jax.Array:
            kinds = _shard_kinds_of_rows(made.sharding)
            whole = np.asarray([values.get(kind, otherwise) for kind in kinds], dtype)
            return jax.make_array_from_callback(whole.shape, at_rows, lambda at: whole[at])

        is_here = by_row(dict.fromkeys(keys, True), False)
        starts = {shard_kind: offsets for shard_kind, (_, offsets) in one.layers.items()}
        offsets = by_row(starts, [0] * len(one.targets), np.int32)
        draw = self._drawing(one, made, cast("Mesh", at_rows.mesh), keys[some])
        leaves = draw(by_row(words, np.zeros_like(words[some])), is_here)
        put = self._putting(one, made, shardings)
        arrays.update(zip(one.arrays, put(targets, leaves, is_here, offsets), strict=True))

    def _drawing(
        self, one: _Round, made: MadeField, mesh: Mesh, key: jax.Array
    ) -> Callable[..., list[jax.Array]]:
        """Return the jitted program that makes whole leaves on each device that stores some."""
        names = [(made.field, target.local) for target in one.targets]

        def draw(words: jax.Array, is_here: jax.Array) -> list[jax.Array]:
            def drawn() -> list[jax.Array]:
                leaves = one.recipe.run(from_words(key, words[0]), names)
                return [words_of(leaf) for leaf in leaves]

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
        return self._programs.setdefault((one.recipe.number, tuple(names)), jax.jit(mapped))

    def _putting(
        self, one: _Round, made: MadeField, shardings: Sequence[NamedSharding]
    ) -> Callable[..., list[jax.Array]]:
        """Return the jitted program that writes each device's part of drawn leaves into arrays."""
        specs = [each.spec for each in shardings]

        def put(
            arrays: list[jax.Array],
            leaves: list[jax.Array],
            is_here: jax.Array,
            offsets: jax.Array,
        ) -> list[jax.Array]:
            def write(_: Any, arrays: list[jax.Array]) -> list[jax.Array]:
                written = list(arrays)
                for i, target in enumerate(one.targets):
                    old = written[target.number]
                    piece = _piece(target, leaves[i][0], made.sharding, old.dtype)
                    if target.is_flat:
                        piece = piece.reshape(-1, *old.shape[1:])
                        piece = jax.lax.dynamic_update_slice_in_dim(old, piece, offsets[0, i], 0)
                    else:
                        piece = _shard(piece, specs[target.number][1:])
                    written[target.number] = piece
                return written

            # A loop that runs zero or one time: it writes its carry in place, and devices without
            # the layer leave it unchanged.
            filled = jax.lax.fori_loop(
                0, is_here[0].astype(jnp.int32), write, [array[0] for array in arrays]
            )
            return [array[None] for array in filled]

        mesh = shardings[0].mesh
        in_specs = (specs, P(mesh.axis_names), made.rows, made.rows)
        mapped = jax.shard_map(put, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        # Donated, so that the arrays are never in memory twice while they are filled.
        jitted = jax.jit(mapped, out_shardings=shardings, donate_argnums=(0,))
        # All rounds of a recipe whose leaves are stored alike share one program.
        key = one.recipe.number, one.targets, tuple(shardings)
        return self._programs.setdefault(key, jitted)


def _piece(target: _Target, leaf: jax.Array, sharding: ShardLayout, dtype: Any) -> jax.Array:
    """Return the part of a leaf in the shard of this device's stage and replica."""
    dim = target.stage_dim
    if dim is not None:
        leaf = _block(leaf, dim, jax.lax.axis_index("stage"), sharding.gathered.num_stages)
    return sharding.piece_of(target.name, leaf, jax.lax.axis_index("data")).astype(dtype)


def _shard(piece: jax.Array, spec: Sequence[Any]) -> jax.Array:
    """Return this device's part of a piece that is sharded over automatic axes."""
    for dim, axes in enumerate(spec):
        if axes is not None:
            piece = _block(piece, dim, jax.lax.axis_index(axes), jax.lax.axis_size(axes))
    return piece


def _shard_kinds_of_rows(sharding: ShardLayout) -> list[int]:
    """Return the kind of shard of each row of the global arrays."""
    num_rows = sharding.gathered.num_stages * sharding.num_shards
    return [sharding.shard_kind(*divmod(row, sharding.num_shards)) for row in range(num_rows)]


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
