"""The state of an optimiser for a part of a model."""

import jax
import optax

from jaxpipe._typing import PyTree
from jaxpipe.errors import ConfigError


def state_struct(optimizer: optax.GradientTransformation, tree: PyTree) -> PyTree:
    """Shapes and dtypes of an optimiser's state for a part of a model's parameters.

    Args:
        optimizer: The optimiser.
        tree: The part, as shapes and dtypes, with the paths of the model.

    Returns:
        The state's shapes and dtypes.

    Raises:
        ConfigError: The optimiser takes the whole model's tree only.
    """
    try:
        return jax.eval_shape(optimizer.init, tree)
    except (KeyError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            "the optimizer must accept any part of the parameters, as each device updates its own, but got one that "
            f"fails with {type(error).__name__}: {first}. Give masks and labels as functions of a tree, not as trees."
        ) from error
