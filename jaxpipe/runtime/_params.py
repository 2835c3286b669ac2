"""The parameters of all stages: their names, their layout, and the way to and from the model's one tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import ModelTrace, cast_floats, flatten_dict, unflatten_dict
from jaxpipe.schedules import Placement

from ._cut import StageCut
from ._layout import Layout


@dataclass(frozen=True)
class StageParams:
    """Names of one stage's parameters in storage, each with its path in the model's tree.

    Attributes:
        own: Parameters of prologues and epilogue.
        trunk: Parameters of the trunk of every chunk; the names are the same on every stage.
        layers: For each layer of the stage: paths inside the layer, to names.
    """

    own: dict[str, Path]
    trunk: dict[str, Path]
    layers: dict[int, dict[Path, str]]

    def view(self, index: int, leaves: Mapping[str, jax.Array]) -> PyTree:
        """One layer's parameters, with the paths inside the layer."""
        return unflatten_dict({path: leaves[name] for path, name in self.layers[index].items()})

    def names_of(self, indices: Sequence[int]) -> list[str]:
        """Names of the parameters of some layers, in order, each once."""
        return list(dict.fromkeys(name for i in indices for name in self.layers[i].values()))

    @property
    def paths(self) -> dict[str, Path]:
        """All names of the stage."""
        return {**self.own, **self.trunk}


class ModelParams:
    """Where the parameters of a model lie in storage.

    Args:
        trace: The model's shapes.
        cuts: The parts of the model, from the input on.
        placement: The stage and chunk that each part is.
        dtype: What real floating-point parameters are held in; None: as the layers make them.
        grad_dtype: What their gradients are summed in; None: float32, or their own dtype where that is wider.

    Attributes:
        stages: Names and paths, stage by stage.
        struct: Shapes and dtypes by path in the model's tree.
        layout: Where the parameters lie.
        grad_layout: Where their summed gradients lie, in the same order.
        tied: Shared parameters that several stages hold, each with those stages; the first one owns it.
    """

    def __init__(
        self,
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        placement: Placement,
        *,
        dtype: Any = None,
        grad_dtype: Any = None,
    ) -> None:
        paths = [paths.paths for paths in trace.paths]
        self.stages: tuple[StageParams, ...] = name_leaves(paths, cuts, placement)
        struct = {path: cast_floats(leaf, dtype) for path, leaf in flatten_dict(trace.tree()).items()}
        self.struct: Mapping[Path, jax.ShapeDtypeStruct] = struct
        held = [{name: struct[path] for name, path in stage.paths.items()} for stage in self.stages]
        dims = trace.tree_dims()
        sharded = {name for stage in self.stages for name, path in stage.paths.items() if path in dims}
        self.layout = Layout(held, sharded=sharded)
        summed = [{name: summed_struct(leaf, grad_dtype) for name, leaf in leaves.items()} for leaves in held]
        self.grad_layout = Layout(summed, sharded=sharded)
        self.trunk_names = tuple(self.stages[0].trunk)
        """Parameters of the trunk of all chunks, chunk after chunk, in the same order in each."""
        self.common_names = tuple(name for name in self.layout.stacked if name not in self.stages[0].trunk)
        """Parameters outside the trunk that every stage holds, such as a tied layer used by all."""
        holders: dict[str, list[int]] = {}
        for s, stage in enumerate(self.stages):
            for name, path in stage.own.items():
                if path[0] == "tied":
                    holders.setdefault(name, []).append(s)
        self.tied = {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}

    def subtree(self, stage: int, tree: PyTree) -> PyTree:
        """The part of the model's tree that a stage holds."""
        flat = flatten_dict(tree)
        return unflatten_dict({path: flat[path] for path in self.stages[stage].paths.values()})

    def leaves(self, stage: int, tree: PyTree) -> dict[str, np.ndarray]:
        """One stage's parameters by name as numpy arrays, from the part of the model's tree that holds them."""
        flat = flatten_dict(tree)
        return {name: np.asarray(flat[path]) for name, path in self.stages[stage].paths.items()}

    def tree(self, leaves: Sequence[Mapping[str, Any]]) -> PyTree:
        """The model's tree from the parameters of every stage by name."""
        flat: dict[Path, Any] = {}
        for stage, held in zip(self.stages, leaves, strict=True):
            for name, path in stage.paths.items():
                flat.setdefault(path, held[name])
        return unflatten_dict({path: flat[path] for path in self.struct})


def summed_struct(leaf: Any, grad_dtype: Any = None) -> Any:
    """Shape and dtype of the sum of a parameter's gradients; None: float32, or the parameter's where that is wider."""
    if grad_dtype is None and jnp.issubdtype(leaf.dtype, jnp.floating):
        grad_dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    return cast_floats(leaf, grad_dtype)


def name_leaves(
    paths: Sequence[Mapping[Path, Path]], cuts: Sequence[StageCut], placement: Placement
) -> tuple[StageParams, ...]:
    """Name the leaves of every stage: after their place in the trunk of their chunk, or after their path.

    Args:
        paths: For each layer of the model, paths inside the layer to paths in the model's tree.
        cuts: The parts of the model.
        placement: The stage and chunk that each part is.
    """
    stages = []
    for parts in placement.virtual:
        stage = StageParams({}, {}, {})
        for chunk, part in enumerate(parts):
            _name_part(paths, cuts[part], chunk, stage)
        stages.append(stage)
    return tuple(stages)


def _name_part(paths: Sequence[Mapping[Path, Path]], cut: StageCut, chunk: int, stage: StageParams) -> None:
    for index in (*cut.prologue, *cut.trunk, *cut.epilogue):
        names = stage.layers[index] = {}
        for local, path in paths[index].items():
            if index in cut.trunk:
                names[local] = "/".join(("trunk", str(chunk), str(index - cut.trunk.start), *local))
                stage.trunk[names[local]] = path
            else:
                names[local] = "/".join(path)
                stage.own[names[local]] = path
