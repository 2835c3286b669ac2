"""What layers keep beside their parameters, such as batch statistics: carried by the stage that holds the layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError
from jaxpipe.layers import ModelTrace, NamedLayer, flatten_dict
from jaxpipe.schedules import Placement

from ._cut import StageCut
from ._layout import Layout
from ._params import name_leaves


class ModelCollections:
    """Where the collections of a model lie in storage.

    Args:
        layers: The model.
        trace: Its shapes.
        cuts: The parts of the model, from the input on.
        placement: The stage and chunk that each part is.

    Attributes:
        struct: Shapes and dtypes by path: the layer's name, then the path inside the layer's collections.
        dims: The dims along which they are sharded over the `model` axis, by the same paths.
        layout: Where they lie.
    """

    def __init__(
        self, layers: Sequence[NamedLayer], trace: ModelTrace, cuts: Sequence[StageCut], placement: Placement
    ) -> None:
        held = [flatten_dict(tree) if tree else {} for tree in trace.collections]
        paths = [{local: (named.name, *local) for local in held[named.index]} for named in layers]
        self.struct: Mapping[Path, Any] = {p[at]: held[i][at] for i, p in enumerate(paths) for at in p}
        self.dims: Mapping[Path, int] = {
            p[at]: dim for i, p in enumerate(paths) for at, dim in trace.collection_dims[i].items()
        }
        self._stages = name_leaves(paths, cuts, placement)
        self.layout = Layout([{n: self.struct[path] for n, path in stage.paths.items()} for stage in self._stages])

    def leaves(self) -> Iterator[tuple[int, str, Path]]:
        """Every leaf of every stage: `(stage, name, path)`."""
        for stage, held in enumerate(self._stages):
            for name, path in held.paths.items():
                yield stage, name, path

    def has_any(self, indices: Sequence[int]) -> bool:
        """Whether one of these layers of the model keeps anything."""
        return any(stage.layers[i] for stage in self._stages for i in indices if i in stage.layers)

    def places(self, stage: int, indices: Sequence[int]) -> tuple[object, ...]:
        """Where the collections of some layers lie: equal where one program can serve both."""
        return tuple(self.layout.place(stage, name) for name in self._stages[stage].names_of(indices))

    def views(self, stage: int, indices: Sequence[int], storage: PyTree) -> list[PyTree]:
        """The collections of some layers of a stage, each as the layer knows them."""
        names = self._stages[stage].names_of(indices)
        leaves = {name: self.layout.get(stage, name, storage) for name in names}
        return [self._stages[stage].view(i, leaves) for i in indices]

    def put(self, stage: int, indices: Sequence[int], storage: PyTree, views: Sequence[PyTree]) -> PyTree:
        """The storage with the collections of some layers replaced."""
        changed = {}
        for index, view in zip(indices, views, strict=True):
            leaves = flatten_dict(view) if view else {}
            changed |= {name: leaves[path] for path, name in self._stages[stage].layers[index].items()}
        return self.layout.put(stage, storage, changed)


def check_collections(layers: Sequence[NamedLayer], trace: ModelTrace) -> None:
    """Refuse variables that move backward only, such as the scales of Flax's FP8 layers.

    Raises:
        LayerError: A layer keeps variables that are to be replaced with their gradient.
    """
    for named in layers:
        found = flatten_dict(trace.collections[named.index] or {})
        names = [".".join(path) for path in found if OVERWRITE_WITH_GRADIENT in path]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LayerError(
                f"layer {named.name} must keep only what its call itself changes, but got {names[0]!r}{more}, which "
                "flax.training replaces with its gradient. A pipeline takes gradients of parameters alone, so FP8 "
                "scales would stay at 1 and clip without a word. Leave out dot_general=Fp8..., and train in bf16."
            )


def mean_over_replicas(storage: PyTree) -> PyTree:
    """Floating-point leaves averaged over the `data` axis; integers, which count calls, are the same on all."""

    def one(leaf: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jax.lax.pmean(leaf, "data") if is_float else jax.lax.pmax(leaf, "data")

    return jax.tree.map(one, storage)
