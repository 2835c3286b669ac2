"""Shapes and dtypes of a microbatch as JSON."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree

_NAME = re.compile("[a-z][a-z0-9_]{0,31}")  # NumPy parses other names as Python
_MOST_DIMS = 64  # of an array of NumPy 2, and so of anything that is saved
_MOST_BYTES = 1 << 62


def dump_struct(tree: PyTree) -> Any:
    """Convert shapes and dtypes in dictionaries, lists and tuples to JSON; None for other nodes."""
    if isinstance(tree, dict):
        inner = {str(key): dump_struct(value) for key, value in tree.items()}
        is_plain = all(isinstance(key, str) for key in tree) and None not in inner.values()
        return {"dict": inner} if is_plain else None
    if type(tree) in (tuple, list):
        items = [dump_struct(item) for item in tree]
        return None if None in items else {type(tree).__name__: items}
    if tree is None:
        return {"none": None}
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {"shape": list(tree.shape), "dtype": np.dtype(tree.dtype).name}
    return None


def load_struct(given: Any) -> PyTree:
    """Convert a result of `dump_struct` back; ValueError for another value."""
    match given:
        case {"shape": shape, "dtype": dtype}:
            return jax.ShapeDtypeStruct(*checked_struct(shape, dtype))
        case {"dict": dict() as inner}:
            return {key: load_struct(value) for key, value in inner.items()}
        case {"tuple": list() as inner}:
            return tuple(load_struct(item) for item in inner)
        case {"list": list() as inner}:
            return [load_struct(item) for item in inner]
        case {"none": None}:
            return None
        case _:
            raise ValueError(f"{given!r:.100} is not a shape and dtype")


def checked_struct(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Convert a shape and a dtype from JSON; ValueError if invalid, or too large for any memory."""
    is_shape = isinstance(shape, list) and all(
        type(n) is int and 0 <= n < _MOST_BYTES for n in shape
    )
    if (
        not is_shape
        or len(shape) > _MOST_DIMS
        or math.prod(n for n in shape if n) >= _MOST_BYTES // 16
    ):
        raise ValueError(f"shape={shape!r:.100} is not a shape")
    try:
        found = jnp.dtype(dtype) if isinstance(dtype, str) and _NAME.fullmatch(dtype) else None
    except TypeError:
        found = None
    if (
        found is None
        or found.name != dtype
        or not (jnp.issubdtype(found, jnp.number) or found == jnp.bool)
    ):
        raise ValueError(f"dtype={dtype!r:.100} is not a dtype")
    return tuple(shape), found
