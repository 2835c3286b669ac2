"""Whether an optimiser treats every parameter by itself, found from its trace."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import ConfigError
from jaxpipe.layers import ModelTrace, flatten_dict, format_struct, unflatten_dict

from ._dependence import output_dependence
from ._elementwise import is_elementwise
from ._params import ModelParams


def check_leafwise(optimizer: optax.GradientTransformation, trees: Sequence[PyTree]) -> None:
    """Refuse an optimiser whose update of one parameter looks at another's gradient.

    Stages hold their own parameters only, so such an update would differ from that of the unpipelined model.

    Args:
        optimizer: The optimiser.
        trees: The parameter trees it will be applied to, as shapes and dtypes.

    Raises:
        ConfigError: Some result depends on more than one parameter.
    """
    for tree in trees:
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]
        if len(names) < 2:
            continue
        state = jax.eval_shape(optimizer.init, tree)
        closed = jax.make_jaxpr(lambda g, s, p: _update(optimizer, g, s, p))(tree, state, tree)
        bits = [1 << i for i in range(len(names))]
        inputs = [*bits, *([0] * len(jax.tree.leaves(state))), *bits]
        for mixed in output_dependence(closed.jaxpr, inputs):
            if mixed & (mixed - 1):
                first, second = [name for i, name in enumerate(names) if mixed >> i & 1][:2]
                raise ConfigError(
                    "the optimizer must update each parameter from its own gradient alone if num_stages > 1 or ZeRO "
                    f"deals parameters out to replicas, but got one whose result mixes {first} and {second}. Devices "
                    "do not see each other's gradients: remove the transformation that couples parameters; in place of "
                    "optax.clip_by_global_norm set gradient_clipping in the config, in place of optax.apply_if_finite "
                    "fp16 or bf16."
                )


def check_sharded(optimizer: optax.GradientTransformation, whole: ModelTrace, params: ModelParams) -> None:
    """Refuse an optimiser that looks at whole arrays of which each place of the `model` axis, or stage, holds a part.

    Args:
        optimizer: The optimiser.
        whole: Shapes of the whole model.
        params: Those of a place, and of a stage where parameters are split over the stages.

    Raises:
        ConfigError: Its update of a sharded parameter is not element by element.
    """
    shapes, paths = flatten_dict(whole.tree()), {**whole.tree_dims(), **params.split_dims}
    trees = [
        {path: jax.ShapeDtypeStruct(each[path].shape, params.struct[path].dtype) for path in paths}
        for each in (shapes, params.struct)
    ]

    def fits(paths: Sequence[Path]) -> bool:
        return is_elementwise(optimizer, *(unflatten_dict({path: tree[path] for path in paths}) for tree in trees))

    if not trees[0] or fits(list(trees[0])):
        return
    path = next((path for path in trees[0] if not fits([path])), next(iter(trees[0])))
    axis, place = ("stage", "stage") if path in params.split_dims else ("model", "place")
    raise ConfigError(
        f"the optimizer must treat every element by itself where a parameter is sharded over the {axis} axis, but got "
        f"one that looks at more of {'/'.join(path)}, of which a {place} holds {format_struct(trees[1][path])} of "
        f"{format_struct(trees[0][path])}. Use one such as Adam, AdamW, Lion or SGD for it; optax.multi_transform "
        "gives other parameters another one."
    )


def _update(optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree) -> Any:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state
