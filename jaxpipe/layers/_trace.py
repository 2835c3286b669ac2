"""The shapes of a model, found by abstract evaluation, layer by layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import JaxpipeError, LayerError

from ._build import NamedLayer
from ._tree import ParamPaths, flatten_dict, merge_layers


@dataclass(frozen=True)
class ModelTrace:
    """What the layers hold and hand over, as shapes and dtypes.

    Attributes:
        boundaries: `boundaries[i]` enters layer i; the last one is the model's output.
        params: Parameters of each layer, with the paths inside the layer.
        paths: Where each layer's parameters lie in the model's tree.
        side: Side inputs by name.
    """

    boundaries: tuple[PyTree, ...]
    params: tuple[PyTree, ...]
    paths: tuple[ParamPaths, ...]
    side: Mapping[str, PyTree]

    def num_params(self) -> tuple[int, ...]:
        """Numbers of parameters, per layer, that an optimiser updates; shared ones count in each layer."""
        return tuple(
            sum(math.prod(x.shape) for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.inexact))
            for p in self.params
        )

    def owners(self) -> dict[Path, tuple[int, Path]]:
        """For each path in the model's tree the layer that makes it, the first of those that share, and its path there."""
        found: dict[Path, tuple[int, Path]] = {}
        for index, paths in enumerate(self.paths):
            for local, at in paths.paths.items():
                found.setdefault(at, (index, local))
        return found

    def tree(self) -> PyTree:
        """The model's one parameter tree, as shapes and dtypes."""
        return merge_layers(self.paths, self.params)


def struct_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree of arrays or Python numbers."""
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree)) if _concrete(tree) else _as_struct(tree)


def _concrete(tree: PyTree) -> bool:
    return not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree))


def _as_struct(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), tree)


def format_struct(tree: PyTree) -> str:
    """A tree of shapes as people write it, such as `float32[4, 8]` or `{'x': int32[2]}`."""
    names = jax.tree.map(lambda x: f"{x.dtype.name}[{', '.join(map(str, x.shape))}]", tree)
    return str(names).replace("'", "") if jax.tree.leaves(tree) else str(tree)


def trace_layers(layers: Sequence[NamedLayer], inputs: PyTree, side: Mapping[str, PyTree] | None = None) -> ModelTrace:
    """Evaluate all layers abstractly; nothing is allocated.

    Args:
        layers: The model.
        inputs: Shapes and dtypes (or arrays) of what the first layer gets.
        side: Side inputs by name.

    Returns:
        The shapes.

    Raises:
        LayerError: A layer cannot take the output of the one before, keeps mutable collections, or shares a parameter
            whose shape differs from the one it is tied to.
    """
    side = struct_of(dict(side or {}))
    boundaries, all_params, all_paths = [struct_of(inputs)], [], []
    shared: dict[Path, tuple[str, Any]] = {}
    for named in layers:
        outputs, params = _trace_layer(named, layers, boundaries[-1], side)
        paths = ParamPaths(named, params)
        _check_shared(named, paths, params, shared)
        boundaries.append(outputs)
        all_params.append(params)
        all_paths.append(paths)
    return ModelTrace(tuple(boundaries), tuple(all_params), tuple(all_paths), side)


def _trace_layer(
    named: NamedLayer, layers: Sequence[NamedLayer], inputs: PyTree, side: PyTree
) -> tuple[PyTree, PyTree]:
    before = "the model's inputs" if named.index == 0 else f"the output of layer {layers[named.index - 1].name}"
    try:
        outputs, params, collections = jax.eval_shape(
            lambda x, s: named.layer.init(jax.random.key(0), x, side=s), inputs, side
        )
    except JaxpipeError:
        raise
    except Exception as error:
        raise LayerError(
            f"layer {named.name} must accept {before}, but got inputs={format_struct(inputs)} and failed with "
            f"{type(error).__name__}: {error}. Make the two layers agree, or put a function between them."
        ) from error
    if collections:
        raise LayerError(
            f"layer {named.name} must keep no state beside its parameters, but got collections={sorted(collections)}. "
            "Use a layer without mutable collections, such as LayerNorm or GroupNorm in place of BatchNorm."
        )
    return outputs, params


def _check_shared(named: NamedLayer, paths: ParamPaths, params: PyTree, shared: dict[Path, tuple[str, Any]]) -> None:
    leaves = flatten_dict(params) if params else {}
    for path, at in paths.paths.items():
        if at[0] != "tied":
            continue
        owner, first = shared.setdefault(at, (named.name, leaves[path]))
        if (first.shape, first.dtype) != (leaves[path].shape, leaves[path].dtype):
            raise LayerError(
                f"tied parameter {'/'.join(at)} must have one shape, but got {format_struct(first)} in layer {owner} "
                f"and {format_struct(leaves[path])} in layer {named.name}. Build both with equal sizes, or tie fewer "
                "parameters with tied_weight_attr."
            )
