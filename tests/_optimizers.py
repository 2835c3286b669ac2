"""Optimisers of tests."""

from typing import Any

import jax
import optax


def refusing_empty_trees(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimiser that fails where it is given no parameters, as `optax.contrib.galore` does."""

    def checked(function: Any) -> Any:
        def run(tree: Any, *args: Any) -> Any:
            if not jax.tree.leaves(tree):
                raise ValueError("too few leaves")
            return function(tree, *args)

        return run

    return optax.GradientTransformation(checked(inner.init), checked(inner.update))
