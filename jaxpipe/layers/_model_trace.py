"""The shapes of a model."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import EXPERT, FSDP
from jaxpipe.programs.jaxpr import ClosedJaxpr, spec_axes
from jaxpipe.schedules.partition import Tie

from ._adapters import LoraParam
from ._axes import on_mesh
from ._load_bias import LoadBias
from ._marks import Marked, Marks, with_mark
from ._param_paths import ParamPaths, merge_layers
from ._precision import cast_floats
from ._sharding import (
    Rules,
    rules_in_force,
)
from ._tree import flatten_dict

T = TypeVar("T")


@dataclass(frozen=True)
class ModelTrace:
    """Variables, inputs and outputs of the layers, as shapes and dtypes; one entry per layer.

    Attributes:
        boundaries: `boundaries[i]` is the input of layer i; the last one is the model's output.
        params: With the paths inside the layer.
        paths: The paths of each layer's parameters in the model's tree.
        firsts: For each layer, the index of the first layer with equal code, arguments and input
            shapes. A tied layer is never equal to another.
        collections: Variables that are not parameters, such as batch statistics.
        aux: Scalars that each layer reports in training, `{"losses": {...}, "metrics": {...}}`.
        param_specs: For each layer, how parameters are sharded over the mesh's automatic axes, by
            path, with an entry for each dim. Parameters that are not sharded are left out.
        collection_specs: The same for collections.
        stage_dims: For each layer, the dims along which a pipeline splits parameters over the
            `stage` axis, by path.
        param_marks: For each layer, the marks of parameters, by path.
        init_on_mesh: Whether a layer makes its variables only with a mesh around it, for example
            because it constrains values by the names of axes.
        programs: Each layer's call in training; equal layers share one program.
        mesh: The mesh that the layers were traced on. Shapes are whole over its automatic axes, and
            one device's share over `stage` and `data`.
        rules: The rules that translated logical names.
        frozen: Parameters that are not trained, by path in the model's tree.
    """

    boundaries: tuple[PyTree, ...]
    params: tuple[PyTree, ...]
    paths: tuple[ParamPaths, ...]
    side: Mapping[str, PyTree]
    firsts: tuple[int, ...]
    collections: tuple[PyTree, ...]
    aux: tuple[PyTree, ...]
    param_specs: tuple[Mapping[Path, PartitionSpec], ...]
    collection_specs: tuple[Mapping[Path, PartitionSpec], ...]
    stage_dims: tuple[Mapping[Path, int], ...]
    param_marks: tuple[Marks, ...]
    init_on_mesh: tuple[bool, ...]
    programs: tuple[ClosedJaxpr, ...]
    mesh: AbstractMesh
    rules: Rules
    frozen: frozenset[Path] = frozenset()

    def on_mesh(self, trace: Callable[[], T]) -> T:
        """Trace layers on the mesh, with the rules in force; see `on_mesh`."""

        def ruled() -> T:
            with rules_in_force(self.rules):
                return trace()

        return on_mesh(self.mesh, ruled)

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """The automatic axes that may divide samples between layers, the outermost first."""
        # `expert` may if it divides only stacks of weights, `[E, ...]`. If layers of a user divide
        # features over it, XLA (JAX 0.10) may abort where it also divides samples.
        uses = {
            dim if set(spec_axes(names)) <= {EXPERT, FSDP} else None
            for specs in self.param_specs
            for spec in specs.values()
            for dim, names in enumerate(spec)
            if EXPERT in spec_axes(names)
        }
        return (FSDP, EXPERT) if uses == {0} else (FSDP,)

    @functools.cached_property
    def load_biases(self) -> frozenset[Path]:
        """Parameters that a load moves, by path in the model's tree; see `load_bias`."""
        return self._with_mark(LoadBias)

    @functools.cached_property
    def adapters(self) -> frozenset[Path]:
        """Parameters of the adapters of `lora`, by path in the model's tree."""
        return self._with_mark(LoraParam)

    def _with_mark(self, mark: type[Marked]) -> frozenset[Path]:
        pairs = zip(self.paths, self.param_marks, strict=True)
        return frozenset(
            paths.paths[path] for paths, marks in pairs for path in with_mark(marks, mark)
        )

    def cast_params(self, index: int, dtype: Any) -> PyTree:
        """The parameters of a layer in the dtypes that it computes with."""
        return cast_floats(self.params[index], dtype, with_mark(self.param_marks[index], LoadBias))

    def num_params(self) -> tuple[int, ...]:
        """Number of parameters of each layer; shared ones count in every layer that uses them."""
        return tuple(sum(math.prod(x.shape) for x in jax.tree.leaves(p)) for p in self.params)

    def num_own_params(self) -> tuple[int, ...]:
        """As `num_params`, without parameters that are split over the `stage` axis."""
        # Every stage has an equal share of the others, wherever the cuts are.
        layers = zip(map(flatten_dict, self.params), self.stage_dims, strict=True)
        return tuple(
            sum(math.prod(x.shape) for p, x in leaves.items() if p not in dims)
            for leaves, dims in layers
        )

    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several layers share, grouped by their key and the layers that share."""
        holders: dict[Path, list[int]] = {}
        sizes: dict[Path, int] = {}
        for index, (paths, params) in enumerate(zip(self.paths, self.params, strict=True)):
            leaves = flatten_dict(params)
            for local, at in paths.paths.items():
                holders.setdefault(at, []).append(index)
                sizes[at] = math.prod(leaves[local].shape)
        groups: dict[tuple[str, tuple[int, ...]], int] = {}
        for at, layers in holders.items():
            if len(layers) > 1:
                group = at[1], tuple(layers)
                groups[group] = groups.get(group, 0) + sizes[at]
        return tuple(Tie(key, layers, size) for (key, layers), size in groups.items())

    def frozen_in(self, index: int) -> frozenset[Path]:
        """Parameters of a layer that are not trained, by path inside the layer."""
        return frozenset(
            local for local, at in self.paths[index].paths.items() if at in self.frozen
        )

    def owners(self) -> dict[Path, tuple[int, Path]]:
        """For each path in the model's tree, the first layer that holds it, and the path inside."""
        found: dict[Path, tuple[int, Path]] = {}
        for index, paths in enumerate(self.paths):
            for local, at in paths.paths.items():
                found.setdefault(at, (index, local))
        return found

    def tree_specs(self) -> dict[Path, PartitionSpec]:
        """Shardings of parameters by path in the model's tree; a shared one has its owner's."""
        return {
            at: self.param_specs[index][local]
            for at, (index, local) in self.owners().items()
            if local in self.param_specs[index]
        }

    def split_dims(self) -> dict[Path, int]:
        """Dims of the parameters split over the `stage` axis, by path in the model's tree."""
        found: dict[Path, int] = {}
        for paths, dims in zip(self.paths, self.stage_dims, strict=True):
            found |= {paths.paths[local]: dim for local, dim in dims.items()}
        return found

    @property
    def total_params(self) -> int:
        """The number of parameters of the model. Shared ones count once."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.tree()))

    def tree(self) -> PyTree:
        """The parameter tree of the whole model, as shapes and dtypes."""
        return merge_layers(self.paths, self.params)
