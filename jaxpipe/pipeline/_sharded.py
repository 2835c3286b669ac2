"""Refusing optimisers that look at whole arrays where each device holds a part of one."""

from collections.abc import Sequence

import jax
import optax

from jaxpipe._typing import Path
from jaxpipe.errors import ConfigError
from jaxpipe.layers import ModelTrace, flatten_dict, format_struct, unflatten_dict
from jaxpipe.optim import is_elementwise
from jaxpipe.state import ModelParams


def check_sharded(optimizer: optax.GradientTransformation, whole: ModelTrace, params: ModelParams) -> None:
    """Refuse an optimiser that looks at whole arrays of which each place of the `model` axis, or stage, holds a part.

    Args:
        optimizer: The optimiser.
        whole: Shapes of the whole model.
        params: Those of a place, and of a stage where parameters are split over the stages.

    Raises:
        ConfigError: Its update of a sharded parameter is not element by element.
    """
    shapes, paths = flatten_dict(whole.tree()), {**whole.tree_dims(), **params.stage_dims}
    trees = [
        {path: jax.ShapeDtypeStruct(each[path].shape, params.struct[path].dtype) for path in paths}
        for each in (shapes, params.struct)
    ]

    def fits(paths: Sequence[Path]) -> bool:
        return is_elementwise(optimizer, *(unflatten_dict({path: tree[path] for path in paths}) for tree in trees))

    if not trees[0] or fits(list(trees[0])):
        return
    path = next((path for path in trees[0] if not fits([path])), next(iter(trees[0])))
    axis, place = ("stage", "stage") if path in params.stage_dims else ("model", "place")
    raise ConfigError(
        f"the optimizer must treat every element by itself where a parameter is sharded over the {axis} axis, but got "
        f"one that looks at more of {'/'.join(path)}, of which a {place} holds {format_struct(trees[1][path])} of "
        f"{format_struct(trees[0][path])}. Use one such as Adam, AdamW, Lion or SGD for it; optax.multi_transform "
        "gives other parameters another one."
    )
