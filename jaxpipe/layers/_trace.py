"""The shapes of a model, found by abstract evaluation, layer by layer."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import JaxpipeError, LayerError

from ._build import NamedLayer
from ._protocol import STANDARD_ARGUMENTS
from ._tree import ParamPaths, flatten_dict, merge_layers, unflatten_dict


@dataclass(frozen=True)
class ModelTrace:
    """What the layers hold and hand over, as shapes and dtypes.

    Attributes:
        boundaries: `boundaries[i]` enters layer i; the last one is the model's output.
        params: Parameters of each layer, with the paths inside the layer.
        paths: Where each layer's parameters lie in the model's tree.
        side: Side inputs by name.
        firsts: For each layer the first one of equal code, arguments and input shapes; tied layers stand alone.
    """

    boundaries: tuple[PyTree, ...]
    params: tuple[PyTree, ...]
    paths: tuple[ParamPaths, ...]
    side: Mapping[str, PyTree]
    firsts: tuple[int, ...]

    def num_params(self) -> tuple[int, ...]:
        """Numbers of parameters, per layer, that an optimiser updates; shared ones count in each layer."""
        return tuple(sum(math.prod(x.shape) for x in jax.tree.leaves(p)) for p in self.params)

    def owners(self) -> dict[Path, tuple[int, Path]]:
        """For each path in the model's tree the first layer that holds it, which makes it, and its path in there."""
        found: dict[Path, tuple[int, Path]] = {}
        for index, paths in enumerate(self.paths):
            for local, at in paths.paths.items():
                found.setdefault(at, (index, local))
        return found

    def tree(self) -> PyTree:
        """The model's one parameter tree, as shapes and dtypes."""
        return merge_layers(self.paths, self.params)


def struct_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree of arrays or Python numbers, as they are once on a device.

    Raises:
        LayerError: A leaf is neither an array nor a number.
    """

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            if not isinstance(leaf, (bool, int, float, complex)):
                raise LayerError(
                    f"every leaf of a batch must be an array or a number, but got {type(leaf).__name__} {leaf!r}. "
                    "Convert it, or leave it out of the batch."
                )
            dtype = jnp.result_type(leaf)
        is_extended = jnp.issubdtype(dtype, jax.dtypes.extended)
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype if is_extended else jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(one, tree)


def as_arrays(tree: PyTree) -> PyTree:
    """Leaves as JAX arrays that no longer promote as Python numbers do, as those that cross a stage boundary."""

    def one(leaf: Any) -> jax.Array:
        array = jnp.asarray(leaf)
        is_extended = jnp.issubdtype(array.dtype, jax.dtypes.extended)
        return array if is_extended else jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(one, tree)


def format_struct(tree: PyTree) -> str:
    """A tree of shapes as people write it, such as `float32[4, 8]` or `{x: int32[2]}`."""
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
        LayerError: A layer cannot take the output of the one before, keeps mutable collections, has a parameter that
            is no floating-point array or whose name holds a slash, or shares one whose shape differs from the one it
            is tied to; or a side input has the name of a standard argument.
    """
    side_struct = _side_struct(side or {})
    boundaries, all_params, all_paths = [struct_of(inputs)], [], []
    shared: dict[Path, tuple[str, Any]] = {}
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    for named in layers:
        alone = named.tied_key is not None or named.layer.identity is None
        kind = named.index if alone else (named.layer.identity, _struct_key(boundaries[-1]))
        first = known.setdefault(kind, named.index)
        if first < named.index:
            outputs, params = boundaries[first + 1], all_params[first]
        else:
            before = f"the output of layer {layers[named.index - 1].name}" if named.index else "the model's inputs"
            given = {at[2:]: x for at, (_, x) in shared.items() if at[1] == named.tied_key and named.shares(at[2:])}
            outputs, params = _trace_layer(named, before, boundaries[-1], side_struct, unflatten_dict(given))
        _check_params(named, params)
        paths = ParamPaths(named, params)
        _check_shared(named, paths, params, shared)
        boundaries.append(outputs)
        all_params.append(params)
        all_paths.append(paths)
        firsts.append(first)
    return ModelTrace(tuple(boundaries), tuple(all_params), tuple(all_paths), side_struct, tuple(firsts))


def _side_struct(side: Mapping[str, PyTree]) -> dict[str, PyTree]:
    reserved = [name for name in STANDARD_ARGUMENTS if name in side]
    if reserved:
        raise LayerError(
            f"a side input must not be named {reserved[0]!r}, which layers get from the pipeline, but got "
            f"side={sorted(side)}. Rename it."
        )
    return struct_of(dict(side))


def _struct_key(tree: PyTree) -> Hashable:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _trace_layer(named: NamedLayer, before: str, inputs: PyTree, side: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
    def make(x: PyTree, s: PyTree, given: PyTree) -> PyTree:
        outputs, params, collections = named.layer.init(jax.random.key(0), x, side=s, given=given)
        return as_arrays(outputs), as_arrays(params), collections

    try:
        try:
            outputs, params, collections = jax.eval_shape(make, inputs, side, {})
        except Exception:
            if not given:
                raise
            outputs, params, collections = jax.eval_shape(make, inputs, side, given)
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
            "Use LayerNorm or GroupNorm in place of BatchNorm, and compute constants inside the call."
        )
    return outputs, params


def _check_params(named: NamedLayer, params: PyTree) -> None:
    for path, leaf in flatten_dict(params).items():
        where = f"parameter {'.'.join(path)!r} of layer {named.name}"
        if any("/" in key for key in (named.name, *path)):
            raise LayerError(f"{where} must have no '/' in its name, but got {path!r}. Rename it.")
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise LayerError(
                f"{where} must be one array, but got a {type(leaf).__name__}. Make a parameter of each of its arrays."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LayerError(
                f"{where} must be floating point, but got {format_struct(leaf)}, which no optimiser can update. "
                "Make it a constant inside the call."
            )


def _check_shared(named: NamedLayer, paths: ParamPaths, params: PyTree, shared: dict[Path, tuple[str, Any]]) -> None:
    leaves = flatten_dict(params)
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
