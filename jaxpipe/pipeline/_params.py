"""Parameter trees from outside: arrays, and those of the model."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import Path, PyTree
from jaxpipe.data import array_fault
from jaxpipe.errors import LayerError
from jaxpipe.layers import flatten_dict, format_struct, unbox

_SHOWN = 8


def read_params(tree: PyTree) -> PyTree:
    """A tree of parameters from outside, without Flax's partition metadata.

    Args:
        tree: A nest of dictionaries whose leaves are arrays of numpy, JAX or torch.

    Returns:
        The tree; its leaves are the same arrays.

    Raises:
        LayerError: It is no dictionary, or leaves are no arrays of floating-point numbers; each is named.
    """
    if not isinstance(tree, Mapping):
        raise LayerError(
            f"the parameters must be a tree of dictionaries, but got a {type(tree).__name__}. Give a tree as "
            "PipelineModule.init returns it, or Flax's variables['params'] for a plain model; without one, initial "
            "parameters are made from base_seed."
        )
    tree = unbox(tree)
    faults = {_name(path): _fault(leaf) for path, leaf in flatten_dict(tree).items()}
    wrong = [f"{name} = {fault}" for name, fault in faults.items() if fault]
    if wrong:
        raise LayerError(
            f"every parameter must be an array of floating-point numbers, but got {_listed(wrong)}. Convert them, as "
            "in numpy.asarray(value, numpy.float32)."
        )
    return tree


def check_params(
    tree: PyTree,
    struct: Mapping[Path, jax.ShapeDtypeStruct],
    repair: str = "Give a tree as PipelineModule.init returns it for the same layers",
) -> PyTree:
    """Refuse a tree that is not the model's.

    Args:
        tree: Parameters by layer, as `PipelineModule.init` returns them.
        struct: The model's parameters by path, as shapes and dtypes.
        repair: What the error advises.

    Returns:
        What `read_params` makes of the tree.

    Raises:
        LayerError: Leaves are no arrays of floating-point numbers, or parameters are missing, unexpected, of another
            shape, or complex where the model's are real; each is named.
    """
    tree = read_params(tree)
    given = flatten_dict(tree)
    missing = [f"missing {_name(path)}" for path in struct if path not in given]
    unexpected = [f"unexpected {_name(path)}" for path in given if path not in struct]
    misfits = [
        f"{_name(path)} is {_form(given[path])}, not {format_struct(like)}"
        for path, like in struct.items()
        if path in given and not _fits(given[path], like)
    ]
    wrong = missing + unexpected + misfits
    if wrong:
        raise LayerError(
            f"the parameters must be those of the model, but got {len(wrong)} difference"
            f"{'' if len(wrong) == 1 else 's'}: {_listed(wrong)}. {repair}."
        )
    return tree


def _fits(leaf: Any, like: jax.ShapeDtypeStruct) -> bool:
    loses_part = jnp.iscomplexobj(np.zeros(0, _dtype(leaf))) and not jnp.iscomplexobj(np.zeros(0, like.dtype))
    return tuple(leaf.shape) == tuple(like.shape) and not loses_part


def _fault(leaf: Any) -> str:
    """What a leaf is that is no array of floating-point numbers; empty where it is one."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return f"a {type(leaf).__name__}"
    fault = array_fault(leaf)
    if fault is not None:
        return fault[0]
    return "" if jnp.issubdtype(_dtype(leaf), jnp.inexact) else _form(leaf)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf).dtype


def _form(leaf: Any) -> str:
    return format_struct(jax.ShapeDtypeStruct(tuple(leaf.shape), _dtype(leaf)))


def _listed(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "; ".join(wrong[:_SHOWN]) + more


def _name(path: Path) -> str:
    return "/".join(path)
