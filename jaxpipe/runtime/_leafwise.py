"""Whether an optimiser treats every parameter by itself, found from its trace."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxpipe._typing import PyTree
from jaxpipe.errors import ConfigError

from ._dependence import output_dependence


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


def _update(optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree) -> Any:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state
