"""The parameters of all stages: their names, their layout, and the way to and from the model's one tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import ModelTrace, cast_floats, flatten_dict, join_path, unflatten_dict
from jaxpipe.schedules import Placement

from ._cut import StageCut
from ._ends import Ends, slice_struct
from ._layout import Layout


@dataclass(frozen=True)
class StageParams:
    """Names of one stage's parameters in storage, each with its path in the model's tree.

    Attributes:
        own: Parameters of prologues and epilogue, and of the ends that all stages run together.
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
        ends: The layers that all stages run together; without them nothing is split over the stages.
        dtype: What the layers compute in, in mixed precision; None: parameters are as the layers make them.
        grad_dtype: What their gradients are summed in; None: float32, or their own dtype where that is wider.

    Attributes:
        stages: Names and paths, stage by stage.
        struct: Shapes and dtypes of the master parameters by path in the model's tree; of one that is split over the
            stages those of a slice.
        master_layout: Where the parameters lie that are kept between steps: in float32 in mixed precision.
        layout: Where those lie that the layers compute with.
        grad_layout: Where the sums of their gradients lie. All three have the same leaves in the same order.
        tied: Parameters that several stages hold alike, each with those stages; the first one owns it.
        split_dims: The dims along which parameters are split over the stages, by path.
        end_names: Parameters of the layers that all stages run together.
    """

    def __init__(
        self,
        trace: ModelTrace,
        cuts: Sequence[StageCut],
        placement: Placement,
        ends: Ends = Ends(),  # noqa: B008  # frozen
        *,
        dtype: Any = None,
        grad_dtype: Any = None,
    ) -> None:
        paths = [paths.paths for paths in trace.paths]
        self.stages: tuple[StageParams, ...] = name_leaves(paths, cuts, placement, ends.layers)
        self.split_dims = ends.dims
        master_dtype = None if dtype is None else jnp.float32
        struct = {
            path: cast_floats(slice_struct(leaf, ends.dims.get(path), placement.num_stages), master_dtype)
            for path, leaf in flatten_dict(trace.tree()).items()
        }
        self.struct: Mapping[Path, jax.ShapeDtypeStruct] = struct
        held = [{name: struct[path] for name, path in stage.paths.items()} for stage in self.stages]
        dims = trace.tree_dims()
        sharded = {name for stage in self.stages for name, path in stage.paths.items() if path in dims}
        self.master_layout = Layout(held, sharded=sharded)
        self.layout = self.master_layout.cast(lambda leaf: cast_floats(leaf, dtype))
        self.grad_layout = self.layout.cast(lambda leaf: summed_struct(leaf, grad_dtype))
        self.trunk_names = tuple(self.stages[0].trunk)
        """Parameters of the trunk of all chunks, chunk after chunk, in the same order in each."""
        self.end_names = tuple(self.stages[0].names_of(ends.layers))
        others = {n for stage in self.stages for n in stage.names_of([i for i in stage.layers if i not in ends.layers])}
        self.common_names = tuple(n for n in self.layout.stacked if n in others and n not in self.stages[0].trunk)
        """Parameters of prologues and epilogue that every stage holds, such as a tied layer used by all."""
        holders: dict[str, list[int]] = {}
        for s, stage in enumerate(self.stages):
            for name, path in stage.own.items():
                if path not in ends.dims:
                    holders.setdefault(name, []).append(s)
        self.tied = {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def summed_struct(leaf: Any, grad_dtype: Any = None) -> Any:
    """Shape and dtype of the sum of a parameter's gradients; None: float32, or the parameter's where that is wider."""
    if grad_dtype is None and jnp.issubdtype(leaf.dtype, jnp.floating):
        grad_dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    return cast_floats(leaf, grad_dtype)


def name_leaves(
    paths: Sequence[Mapping[Path, Path]], cuts: Sequence[StageCut], placement: Placement, ends: Sequence[int] = ()
) -> tuple[StageParams, ...]:
    """Name the leaves of every stage: after their place in the trunk of their chunk, or after their path.

    Args:
        paths: For each layer of the model, paths inside the layer to paths in the model's tree.
        cuts: The parts of the model.
        placement: The stage and chunk that each part is.
        ends: Layers that lie on all stages.
    """
    stages = []
    for parts in placement.virtual:
        stage = StageParams({}, {}, {})
        for chunk, part in enumerate(parts):
            cut = cuts[part]
            _name_layers(paths, (*cut.prologue, *cut.trunk, *cut.epilogue), cut.trunk, chunk, stage)
        _name_layers(paths, ends, range(0), 0, stage)
        stages.append(stage)
    return tuple(stages)


def _name_layers(
    paths: Sequence[Mapping[Path, Path]], indices: Sequence[int], trunk: range, chunk: int, stage: StageParams
) -> None:
    for index in indices:
        names = stage.layers[index] = {}
        for local, path in paths[index].items():
            if index in trunk:
                names[local] = join_path(("trunk", str(chunk), str(index - trunk.start), *local))
                stage.trunk[names[local]] = path
            else:
                names[local] = join_path(path)
                stage.own[names[local]] = path
