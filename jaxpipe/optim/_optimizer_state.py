"""An optimiser on a part of a model: its state, one update, and the paths in its state."""

import contextlib
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
    """One update, from gradients of some parameters and the state for them.

    Returns:
        `(parameters, state)`.
    """
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def leaf_paths(tree: PyTree) -> list[Path]:
    """The path of every leaf of a tree, as the names of its keys, attributes and indices."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path in paths]


def find_param(state_path: Path, known: Collection[Path]) -> tuple[int, int] | None:
    """Begin and end of a parameter's path in that of a leaf of the state."""
    size = len(state_path)
    runs = ((i, j) for i in range(size) for j in range(i + 1, size + 1) if state_path[i:j] in known)
    return next(runs, None)
