"""Optimisers that depend on what a model does with its parameters."""

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp
import optax

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.layers import ModelTrace, flatten_dict, hidden_matrices, unflatten_dict

Matrices = Callable[[PyTree], PyTree] | None
"""A function of a tree of parameters to a tree of whether each is a hidden matrix."""


class MatrixOptimizer(optax.GradientTransformation):
    """An optimiser that treats hidden matrices differently from all other parameters.

    As it is, it takes every parameter of two dims for one. A pipeline makes it again for its model.
    """

    make: Callable[[Matrices], optax.GradientTransformation]

    def __new__(cls, make: Callable[[Matrices], optax.GradientTransformation]) -> "MatrixOptimizer":
        """Make the optimiser for any tree."""
        optimizer = super().__new__(cls, *make(None))
        optimizer.make = make
        return optimizer


def for_model(
    optimizer: optax.GradientTransformation, trace: ModelTrace, bias_rate: float
) -> optax.GradientTransformation:
    """The optimiser for the trees of a model, which knows the model's hidden matrices.

    It moves the parameters that `jaxpipe.layers.load_bias` marks by `bias_rate` against the signs
    of their loads. The optimiser that is passed in does not see these parameters.
    """
    optimizer = for_matrices(optimizer, trace)
    if not trace.load_biases:
        return optimizer
    return _with_load_biases(optimizer, trace.load_biases, bias_rate)


def for_matrices(
    optimizer: optax.GradientTransformation, trace: ModelTrace
) -> optax.GradientTransformation:
    """The optimiser, which knows the model's hidden matrices if it asks for them."""
    if not isinstance(optimizer, MatrixOptimizer):
        return optimizer
    paths = hidden_matrices(trace)
    return optimizer.make(
        lambda params: unflatten_dict({path: path in paths for path in flatten_dict(params)})
    )


def _with_load_biases(
    optimizer: optax.GradientTransformation, biases: Collection[Path], rate: float
) -> optax.GradientTransformation:
    def others(tree: PyTree) -> PyTree:
        return unflatten_dict({p: x for p, x in flatten_dict(tree).items() if p not in biases})

    def init(params: PyTree) -> PyTree:
        return optimizer.init(others(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        moves = {
            path: -rate * jnp.sign(load)
            for path, load in flatten_dict(updates).items()
            if path in biases
        }
        of_others = None if params is None else others(params)
        new, state = optimizer.update(others(updates), state, of_others)
        return unflatten_dict(flatten_dict(new) | moves), state

    return optax.GradientTransformation(init, update)
