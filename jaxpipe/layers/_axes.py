"""The mesh axes that layers may use with collectives of their own.

`model`: the layers of a stage are split over it. `data`: the replicas, each with its own samples.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError

MODEL, DATA = "model", "data"

T = TypeVar("T")


def bound_axis(name: str) -> int:
    """Length of a mesh axis around this code; 0 where there is none."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return 0


def is_unbound_axis(error: Exception) -> bool:
    """True if an error says that there is no axis of some name; Python's own errors of names tell which."""
    return type(error) is NameError and error.name is None


def with_axes(lengths: Mapping[str, int], trace: Callable[[], T]) -> T:
    """Trace layers as they run on one device of a mesh.

    Args:
        lengths: Lengths of the mesh's axes; 0 for none. One that is around this code already stays as it is.
        trace: A function that traces layers abstractly and returns no traced values.

    Returns:
        What `trace` returns.
    """
    name = next((name for name, length in lengths.items() if length and not bound_axis(name)), None)
    if name is None:
        return trace()
    found: list[T] = []

    def run(place: Any) -> Any:
        found.append(with_axes(lengths, trace))
        return place

    jax.vmap(run, axis_name=name, axis_size=lengths[name])(np.arange(lengths[name]))
    return found[0]


def call_on_one(has_model_axis: bool, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call layers on axes one wide, where sharded parameters are whole and all samples are on one replica.

    Args:
        has_model_axis: Whether there is to be an axis `model`. The axis `data` is there for layers that ask for it. An
            axis that is around this code already stays as it is.
        function: A function of trees of arrays. What it closes over is not mapped, so that random bits stay the same;
            `all_to_all` wants mapped arrays.
        *args: Its arguments.

    Returns:
        What it returns.
    """
    names = (MODEL,) if has_model_axis and not bound_axis(MODEL) else ()
    try:
        return _call_on(names, function, *args)
    except NameError as error:
        if not is_unbound_axis(error) or bound_axis(DATA):
            raise
    # Only now: not everything that a layer may call can be mapped, such as a callback to the host.
    return _call_on((*names, DATA), function, *args)


def _call_on(names: Sequence[str], function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    if not names:
        return function(*args)
    mapped = jax.vmap(lambda *args: _call_on(names[1:], function, *args), axis_name=names[0], axis_size=1)
    return jax.tree.map(lambda x: x[0], mapped(*jax.tree.map(lambda x: jnp.asarray(x)[None], args)))


def unbox(tree: PyTree) -> PyTree:
    """A tree of variables without Flax's partition metadata."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, meta.Partitioned):
            return leaf.unbox(apply_constraint=False)
        return leaf.unbox() if _is_box(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=_is_box)


def sharded_dims(label: str, tree: PyTree, axis: str = MODEL) -> Mapping[Path, int]:
    """Variables that are sharded over an axis, with the dim, by Flax's partition metadata.

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
