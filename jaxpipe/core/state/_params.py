"""Names and layouts of the leaves of all stages: parameters, and the layers' collections."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import FSDP, axes_length, sum_over
from jaxpipe.errors import LayerError
from jaxpipe.layers import (
    ModelTrace,
    NamedLayer,
    cast_floats,
    flatten_dict,
    join_path,
    split_path,
    unflatten_dict,
)
from jaxpipe.programs.jaxpr import spec_without
from jaxpipe.schedules import Placement

from ._layout import Layout, Slot, Stacked, Storage
from ._vocab_layers import StageCut, VocabLayers, slice_struct

LayerTree: TypeAlias = PyTree
"""Variables of one layer, as nested dictionaries with the paths inside the layer."""

Paths = Mapping[str, Path]
"""Paths of leaves in the model's tree, by name."""


@dataclass(frozen=True)
class StageLeaves:
    """Names of one stage's leaves in storage, each with its path in the model's tree.

    Attributes:
        off_trunk: Leaves of prologues, epilogue and vocabulary-parallel layers. The name is the
            path, so that a tied parameter has the same name on all stages.
        trunk: Leaves of all trunks. Names are the same on every stage, and paths differ.
        layers: For each layer of the stage the names by path inside the layer.
    """

    off_trunk: dict[str, Path]
    trunk: dict[str, Path]
    layers: dict[int, dict[Path, str]]

    def view(self, index: int, leaves: Mapping[str, jax.Array]) -> LayerTree:
        """Return one layer's leaves as a tree, with the paths inside the layer."""
        return unflatten_dict({path: leaves[name] for path, name in self.layers[index].items()})

    def names_of(self, indices: Sequence[int]) -> list[str]:
        """Return the names of the leaves of some layers, in order and without repetition."""
        return list(dict.fromkeys(name for i in indices for name in self.layers[i].values()))

    @property
    def paths(self) -> dict[str, Path]:
        """All names of the stage's leaves, with their paths."""
        return {**self.off_trunk, **self.trunk}


@dataclass(frozen=True)
class StageParam:
    """One parameter on one of the stages that hold it.

    Attributes:
        stage_dim: The dim that is sliced over the stages, or None. The shapes are those of a slice.
        spec: Sharding over automatic axes, or None.
        holders: Stages that hold copies of it off the trunk. Slices are not copies.
        is_trained: Whether this stage trains it.
        is_frozen: Whether no stage trains the leaf of this name. A leaf of the trunk is only frozen
            if no virtual stage trains it, because the trunk is one program.
        is_load_bias: Whether a load moves it; see `load_bias`.
        master: Shape and dtype between steps. Without masters, and if frozen, it is `computed`.
        computed: Shape and dtype in which the layers compute.
        summed: Shape and dtype of the sum of its gradients.
    """

    name: str
    path: Path
    stage_dim: int | None
    spec: P | None
    holders: tuple[int, ...]
    is_trained: bool
    is_frozen: bool
    is_load_bias: bool
    master: jax.ShapeDtypeStruct
    computed: jax.ShapeDtypeStruct
    summed: jax.ShapeDtypeStruct


Table = Sequence[Mapping[str, StageParam]]
"""For each stage its parameters, by name."""


def layout_of(
    table: Table,
    dtype: Callable[[StageParam], jax.ShapeDtypeStruct],
    *,
    whole_along: str | None = None,
    trained: bool = False,
) -> Layout:
    """Lay out all parameters, or all but frozen ones, in one of a row's dtypes."""
    # No leaf is sharded over the automatic axis `whole_along`. A leaf that had a sharding keeps its
    # dims, even if no axis is left. Frozen leaves have separate buffers, so the others have the
    # same offsets without them.
    rows = [[row for row in stage.values() if not (trained and row.is_frozen)] for stage in table]
    return Layout(
        [{row.name: dtype(row) for row in stage} for stage in rows],
        specs=[
            {row.name: spec_without(row.spec, whole_along) for row in stage if row.spec is not None}
            for stage in rows
        ],
        frozen=[row.name for stage in rows for row in stage if row.is_frozen],
    )


class ModelParams:
    """Names and layouts of a model's parameters.

    Without `vocab`, nothing is sliced over the stages. `dtype` is the dtype that the layers compute
    in, for mixed precision; None keeps the dtypes in which the layers make their parameters.
    `grad_dtype` is the dtype in which gradients are summed; None means float32, or the gradients'
    own dtype if it is wider. With `trains` there are masters, in float32 in mixed precision.
    Otherwise all parameters are stored in `dtype`, like frozen ones. With `gather` the parameters
    that layers compute with are whole along `fsdp` for the whole step.

    Attributes:
        table: A row for each parameter of each stage. All else follows from it.
        struct: Shapes and dtypes of the master parameters by path in the model's tree. Parameters
            that are sliced over the stages have the shape of a slice.
        trained: Shapes and dtypes of the trained parameters by path.
        frozen: Names of leaves that no stage trains. They are stored in the dtype that the layers
            compute in.
        partly_frozen: Names in the trunk that some stages train, with a flag for each stage:
            whether it has the parameter frozen.
        tied: Trained parameters that several stages hold, each with these stages. The first stage
            owns the parameter.
        trained_paths: For each stage the paths of the trained parameters, by name.
        master_layout: Layout of the master parameters, which are stored between steps, in float32
            in mixed precision. It includes frozen parameters.
        trained_layout: The same without frozen parameters.
        at_rest: Layout of the parameters in the compute dtype, divided like the master parameters.
        gathered: Layout of the parameters while layers run: whole along `fsdp`.
        layout: Layout during a step of the parameters that the layers compute with: `gathered` with
            `gather`, otherwise `at_rest`.
        grad_layout: Layout of the gradient sums, without frozen parameters. The leaves of all
            layouts have the same order.
        grad_dtypes: For each packed buffer of `grad_layout` the dtype of its leaves' gradients:
            the dtype of the parameters, or of the sums if the parameters' dtypes differ.
        load_biases: Names of the parameters that a load moves; see `load_bias`.
        vocab_names: Names of the trained parameters of vocabulary-parallel layers.
        stacked_off_trunk: Names of trained parameters of prologues and epilogue that every stage
            holds, such as those of a layer that is tied on all stages.
    """

    def __init__(
        self,
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        placement: Placement,
        vocab: VocabLayers = VocabLayers(),  # noqa: B008  # frozen
        *,
        dtype: Any = None,
        grad_dtype: Any = None,
        gather: bool = False,
        trains: bool = True,
    ) -> None:
        paths = [paths.paths for paths in trace.paths]
        self.stages = name_leaves(paths, cuts, placement, vocab.layers)
        self.table = _table_of(self.stages, trace, vocab, dtype, grad_dtype, trains=trains)
        self.master_layout = layout_of(self.table, lambda row: row.master)
        self.trained_layout = layout_of(self.table, lambda row: row.master, trained=True)
        self.at_rest = layout_of(self.table, lambda row: row.computed)
        self.gathered = layout_of(self.table, lambda row: row.computed, whole_along=FSDP)
        self.layout = self.gathered if gather else self.at_rest
        self.grad_layout = layout_of(self.table, lambda row: row.summed, trained=True)
        self.grad_dtypes = _packed_dtypes(self.grad_layout, self.gathered)
        rows = [row for stage in self.table for row in stage.values()]
        self.frozen = frozenset(row.name for row in rows if row.is_frozen)
        self.partly_frozen = {
            row.name: tuple(not stage[row.name].is_trained for stage in self.table)
            for row in rows
            if not row.is_trained and not row.is_frozen
        }
        self.tied = {
            row.name: row.holders for row in rows if len(row.holders) > 1 and not row.is_frozen
        }
        first = self.stages[0]
        self.vocab_names = [n for n in first.names_of(vocab.layers) if n not in self.frozen]
        ends = {
            name
            for stage in self.stages
            for index, names in stage.layers.items()
            if index not in vocab.layers
            for name in names.values()
        }
        self.stacked_off_trunk = [
            name for name in self.grad_layout.stacked if name in ends and name not in first.trunk
        ]
        self.load_biases = frozenset(row.name for row in rows if row.is_load_bias)
        # In the order of the model's tree.
        by_path = {row.path: row for row in rows}
        ordered = [by_path[path] for path in flatten_dict(trace.tree())]
        self.struct = {row.path: row.master for row in ordered}
        self.trained = {row.path: row.master for row in ordered if row.is_trained}
        self.trained_paths = tuple(
            {row.name: row.path for row in stage.values() if row.is_trained} for stage in self.table
        )

    def frozen_in(self, stage: int, index: int) -> frozenset[Path]:
        """Return the paths inside a stage's layer of the leaves that are frozen on all stages."""
        return frozenset(
            path for path, name in self.stages[stage].layers[index].items() if name in self.frozen
        )


class ModelCollections:
    """Names and layout of collections: variables that are not parameters, like batch statistics."""

    def __init__(
        self,
        layers: Sequence[NamedLayer],
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        placement: Placement,
    ) -> None:
        flat = [flatten_dict(tree) if tree else {} for tree in trace.collections]
        paths = [{local: (named.name, *local) for local in flat[named.index]} for named in layers]
        # By path: the layer's name, then the path inside the layer's collections.
        self.struct: Mapping[Path, Any] = {
            p[at]: flat[i][at] for i, p in enumerate(paths) for at in p
        }
        specs: dict[Path, P] = {
            p[at]: spec
            for i, p in enumerate(paths)
            for at, spec in trace.collection_specs[i].items()
        }
        self._stages = name_leaves(paths, cuts, placement)
        self.layout = Layout(
            [{n: self.struct[path] for n, path in stage.paths.items()} for stage in self._stages],
            specs=[
                {n: specs[path] for n, path in stage.paths.items() if path in specs}
                for stage in self._stages
            ],
        )

    def leaves(self) -> Iterator[tuple[int, str, Path]]:
        """Yield `(stage, name, path)` for every leaf of every stage."""
        for number, stage in enumerate(self._stages):
            for name, path in stage.paths.items():
                yield number, name, path

    def has_any(self, indices: Sequence[int]) -> bool:
        """True if any of these layers of the model has collections."""
        return any(stage.layers[i] for stage in self._stages for i in indices if i in stage.layers)

    def slots(self, stage: int, indices: Sequence[int]) -> tuple[Slot, ...]:
        """Return the slots of some layers' collections; equal if one program can serve both."""
        return tuple(
            self.layout.slot(stage, name) for name in self._stages[stage].names_of(indices)
        )

    def views(self, stage: int, indices: Sequence[int], storage: Storage) -> list[LayerTree]:
        """Return the collections of some layers of a stage, with the paths inside each layer."""
        names = self._stages[stage].names_of(indices)
        leaves = {name: self.layout.get(stage, name, storage) for name in names}
        return [self._stages[stage].view(i, leaves) for i in indices]

    def put(
        self, stage: int, indices: Sequence[int], storage: Storage, views: Sequence[LayerTree]
    ) -> Storage:
        """Replace the collections of some layers in a storage."""
        changed = {}
        for index, view in zip(indices, views, strict=True):
            leaves = flatten_dict(view) if view else {}
            changed |= {
                name: leaves[path] for path, name in self._stages[stage].layers[index].items()
            }
        return self.layout.put(stage, storage, changed)


def _table_of(
    stages: Sequence[StageLeaves],
    trace: ModelTrace,
    vocab: VocabLayers,
    dtype: Any,
    grad_dtype: Any,
    *,
    trains: bool,
) -> Table:
    # Updates are small compared with the weights: added in bfloat16, with 8 bits of precision, most
    # of them would be rounded away.
    master_dtype = np.promote_types(dtype, np.float32) if trains and dtype is not None else dtype
    made = flatten_dict(trace.tree())
    specs = trace.tree_specs()
    frozen = _frozen_names(stages, trace.frozen)

    def row(name: str, path: Path) -> StageParam:
        is_load_bias = path in trace.load_biases
        dim = vocab.dims.get(path)
        leaf = slice_struct(made[path], dim, len(stages))
        # Nothing casts a parameter that a load moves.
        computed = leaf if is_load_bias else cast_floats(leaf, dtype)
        master = computed if is_load_bias or name in frozen else cast_floats(leaf, master_dtype)
        summed = computed if is_load_bias else grad_accum_struct(computed, grad_dtype)
        holders = [s for s, stage in enumerate(stages) if dim is None and name in stage.off_trunk]
        return StageParam(
            name,
            path,
            dim,
            specs.get(path),
            tuple(holders),
            path not in trace.frozen,
            name in frozen,
            is_load_bias,
            master,
            computed,
            summed,
        )

    return [{name: row(name, path) for name, path in stage.paths.items()} for stage in stages]


def _frozen_names(stages: Sequence[StageLeaves], frozen: Collection[Path]) -> frozenset[str]:
    """Return the names that no stage trains, and in the trunk no chunk: chunks share a program."""

    def leaf_of(name: str, stage: StageLeaves) -> object:
        return split_path(name)[2:] if name in stage.trunk else name

    leaves = [
        (leaf_of(name, stage), name, path) for stage in stages for name, path in stage.paths.items()
    ]
    trained = {leaf for leaf, _, path in leaves if path not in frozen}
    return frozenset(name for leaf, name, _ in leaves if leaf not in trained)


def _packed_dtypes(layout: Layout, other: Layout) -> Mapping[str, Any]:
    """Return each packed buffer's dtype of leaves in `other`, or its own dtype if they differ."""
    found: dict[str, set[Any]] = {}
    for stage in range(layout.num_stages):
        for name in layout.names(stage):
            slot = layout.slot(stage, name)
            if not isinstance(slot, Stacked):
                found.setdefault(slot.buffer, set()).add(other.struct_of(stage, name).dtype)
    return {
        buffer: next(iter(dtypes)) if len(dtypes) == 1 else layout.buffers[buffer].dtype
        for buffer, dtypes in found.items()
    }


def grad_accum_struct(leaf: Any, grad_dtype: Any = None) -> Any:
    """Return shape and dtype of the sum of a parameter's gradients, at least float32 by default."""
    if grad_dtype is None and jnp.issubdtype(leaf.dtype, jnp.floating):
        grad_dtype = np.promote_types(leaf.dtype, np.float32)
    return cast_floats(leaf, grad_dtype)


def check_collections(layers: Sequence[NamedLayer], trace: ModelTrace) -> None:
    """Raise LayerError for variables that their gradient replaces, such as Flax's FP8 scales."""
    for named in layers:
        found = flatten_dict(trace.collections[named.index] or {})
        names = [".".join(path) for path in found if OVERWRITE_WITH_GRADIENT in path]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LayerError(
                f"layer {named.name} must keep only variables that its own call updates, but got "
                f"{names[0]!r}{more}, which flax.training replaces with its gradient. A pipeline "
                "computes gradients of parameters only, so FP8 scales would stay at 1 and values "
                "would be clipped silently. Remove dot_general=Fp8... and train in bf16."
            )


def mean_over_replicas(storage: Storage) -> Storage:
    """Average the floating-point leaves of collections over the `data` axis."""
    if axes_length("data") == 1:
        return storage

    def one(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return sum_over(leaf, "data") / axes_length("data")
        # Integers count calls and are equal, so their maximum is the value. A mean would not be an
        # integer.
        return jax.lax.pmax(leaf, "data")

    return jax.tree.map(one, storage)


def name_leaves(
    paths: Sequence[Mapping[Path, Path]],
    cuts: Sequence[StageCut],
    placement: Placement,
    everywhere: Sequence[int] = (),
) -> tuple[StageLeaves, ...]:
    """Name each stage's leaves; `paths` maps a layer's inner paths to those in the model's tree."""
    stages = []
    for virtual_stages in placement.virtual:
        stage = StageLeaves({}, {}, {})
        for chunk, virtual_stage in enumerate(virtual_stages):
            cut = cuts[virtual_stage]
            _name_layers(paths, (*cut.prologue, *cut.trunk, *cut.epilogue), cut.trunk, chunk, stage)
        # Without a trunk, so that each leaf is named after its path, with one name on all stages.
        _name_layers(paths, everywhere, range(0), 0, stage)
        stages.append(stage)
    return tuple(stages)


def _name_layers(
    paths: Sequence[Mapping[Path, Path]],
    indices: Sequence[int],
    trunk: range,
    chunk: int,
    stage: StageLeaves,
) -> None:
    for index in indices:
        names = stage.layers[index] = {}
        for local, path in paths[index].items():
            if index in trunk:
                # Named by the index in the trunk, not in the model, so that leaves of equal layers
                # have the same name on all stages and are stacked.
                names[local] = join_path(("trunk", str(chunk), str(index - trunk.start), *local))
                stage.trunk[names[local]] = path
            else:
                names[local] = join_path(path)
                stage.off_trunk[names[local]] = path
