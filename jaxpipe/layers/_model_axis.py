"""The mesh axis `model`, over which the layers of a stage are split with collectives of their own."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError

_AXIS = "model"

T = TypeVar("T")


def bound_model_axis() -> int:
    """Length of the axis `model` around this code; 0 where there is none."""
    try:
        return jax.lax.axis_size(_AXIS)
    except NameError:
        return 0


def with_model_axis(size: int, trace: Callable[[], T]) -> T:
    """Trace layers as they run on one place of a `model` axis.

    Args:
        size: Length of the axis; 0 for none. An axis that is around this code already stays as it is.
        trace: A function that traces layers abstractly and returns no traced values.

    Returns:
        What `trace` returns.
    """
    if not size or bound_model_axis():
        return trace()
    found: list[T] = []

    def run(place: Any) -> Any:
        found.append(trace())
        return place

    jax.vmap(run, axis_name=_AXIS, axis_size=size)(np.arange(size))
    return found[0]


def call_on_one(has_axis: bool, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call layers on a `model` axis one wide, where sharded parameters are whole.

    Args:
        has_axis: Whether there is to be such an axis. One that is around this code already stays as it is.
        function: A function of trees of arrays. What it closes over is not mapped, so that random bits stay the same;
            `all_to_all` wants mapped arrays.
        *args: Its arguments.

    Returns:
        What it returns.
    """
    if not has_axis or bound_model_axis():
        return function(*args)
    mapped = jax.vmap(function, axis_name=_AXIS, axis_size=1)
    return jax.tree.map(lambda x: x[0], mapped(*jax.tree.map(lambda x: jnp.asarray(x)[None], args)))


def unbox(tree: PyTree) -> PyTree:
    """A tree of variables without Flax's partition metadata."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, meta.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return leaf.unbox() if _is_box(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=_is_box)


def sharded_dims(label: str, tree: PyTree, axis: str = _AXIS) -> Mapping[Path, int]:
    """Which variables are sharded over an axis, and along which dim, by Flax's partition metadata.

    Other names are ignored: they are for automatic partitioning, which a pipeline does not use.

    Args:
        label: How errors name the layer.
        tree: Variables, those with metadata in boxes of `flax.core.meta`.
        axis: The axis.

    Returns:
        Dims by path.

    Raises:
        LayerError: A variable names the axis for more than one dim.
    """
    found = {}
    for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_box):
        spec = tuple(nn.get_partition_spec(leaf) or ()) if _is_box(leaf) else ()
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        dims = [dim for dim, names in enumerate(spec) if axis in (names if isinstance(names, tuple) else (names,))]
        if len(dims) > 1:
            raise LayerError(
                f"{'.'.join(path)!r} of layer {label} must be sharded over the {axis!r} axis along one dim, but got "
                f"the partition metadata {spec}. Leave {axis!r} at one dim."
            )
        if dims:
            found[path] = dims[0]
    return found


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, meta.AxisMetadata)
