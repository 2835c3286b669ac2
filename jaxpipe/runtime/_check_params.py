"""Comparing a parameter tree from outside with the model's own."""

from collections.abc import Mapping

import jax

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError
from jaxpipe.layers import flatten_dict, format_struct

_SHOWN = 8


def check_params(tree: PyTree, struct: Mapping[Path, jax.ShapeDtypeStruct]) -> None:
    """Refuse a tree that is not the model's.

    Args:
        tree: Parameters by layer, as `PipelineModule.init` returns them.
        struct: The model's parameters by path, as shapes and dtypes.

    Raises:
        LayerError: Parameters are missing, unexpected or of another shape; each is named.
    """
    given = flatten_dict(tree)
    missing = [f"missing {_name(path)}" for path in struct if path not in given]
    unexpected = [f"unexpected {_name(path)}" for path in given if path not in struct]
    shapes = [
        f"{_name(path)} is {format_struct(given[path])}, not {format_struct(like)}"
        for path, like in struct.items()
        if path in given and tuple(given[path].shape) != tuple(like.shape)
    ]
    wrong = missing + unexpected + shapes
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise LayerError(
            f"the parameters must be those of the model, but got {len(wrong)} differences: {'; '.join(wrong[:_SHOWN])}"
            f"{more}. Give a tree as PipelineModule.init returns it for the same layers."
        )


def _name(path: Path) -> str:
    return "/".join(path)
