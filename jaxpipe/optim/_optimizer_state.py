"""An optimiser on a part of a model: its state, one update, and the paths in its state."""

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax
import optax

from jaxpipe._typing import Path, PyTree
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
    with refusing_parts():
        return jax.eval_shape(optimizer.init, tree)


@contextlib.contextmanager
def refusing_parts() -> Iterator[None]:
    """Say of an optimiser that fails inside that it fails on a part of a model.

    Raises:
        ConfigError: It does.
    """
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(
            "the optimizer must accept any part of the parameters, as each device updates its own, but got one that "
            f"fails with {type(error).__name__}: {first}. Give masks and labels as functions of a tree, not as trees."
        ) from error


def apply_update(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[Any, Any]:
    """One update.

    Args:
        optimizer: The optimiser.
        grads: Gradients of some parameters.
        state: Its state for them.
        params: The parameters.

    Returns:
        `(parameters, state)`.

    Raises:
        ConfigError: The optimiser asks for more than these.
    """
    try:
        updates, state = optimizer.update(grads, state, params)
    except (TypeError, ValueError) as error:
        missing = re.search(r"missing \d+ required [\w -]*arguments?: (.*)|(\w+) must be provided", str(error))
        if missing is None:
            raise
        raise ConfigError(
            "the optimizer must update parameters from gradients, state and parameters alone, as a step of a pipeline "
            f"hands it nothing else, but got one that also needs {missing[1] or missing[2]}. Remove the transformation "
            "that asks for it; in place of optax.contrib.reduce_on_plateau use a learning-rate schedule, or set the "
            "learning rate between steps with PipelineEngine.set_lr."
        ) from error
    return optax.apply_updates(params, updates), state


def leaf_paths(tree: PyTree) -> list[Path]:
    """The path of every leaf of a tree, as the names of its keys, attributes and indices."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path in paths]


def find_param(place: Path, known: Collection[Path]) -> tuple[int, int] | None:
    """Where the path of a parameter begins and ends in that of a leaf of the state."""
    runs = ((i, j) for i in range(len(place)) for j in range(i + 1, len(place) + 1) if place[i:j] in known)
    return next(runs, None)
