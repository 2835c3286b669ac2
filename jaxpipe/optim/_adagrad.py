"""Adagrad with PyTorch's parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import PyTree
from jaxpipe.config import number, read_flag

from ._adam import maximized
from ._recipe import Factory, Hyperparams, Recipe, clipping_refused


class SquaresState(NamedTuple):
    """Sums of squared gradients, `total`, after `step` updates."""

    step: jax.Array
    total: PyTree


def scale_by_total_squares(
    initial: float, eps: float, lr_decay: float
) -> optax.GradientTransformation:
    """Adagrad's direction, `g / (sqrt(sum of g * g) + eps) / (1 + step * lr_decay)`."""
    # `optax.scale_by_rss` adds `eps` inside the square root, and has no `lr_decay`.

    def init(params: PyTree) -> SquaresState:
        return SquaresState(jnp.zeros([], jnp.int32), optax.tree.full_like(params, initial))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, SquaresState]:
        del params
        total = jax.tree.map(
            lambda g, s: (s + g * jnp.conj(g)).astype(s.dtype), updates, state.total
        )
        # Counts only the updates before this one, as in PyTorch: the first is not shrunk.
        shrink = 1 + state.step.astype(jnp.float32) * lr_decay
        direction = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps) / shrink, updates, total)
        return direction, SquaresState(jnp.asarray(optax.safe_increment(state.step)), total)

    return optax.GradientTransformation(init, update)


def adagrad_recipe() -> Recipe:
    """The recipe of `Adagrad`."""
    return Recipe(
        params={
            "lr": (0.01, number(0.0)),
            "lr_decay": (0.0, number(0.0)),
            "weight_decay": (0.0, number(0.0)),
            "initial_accumulator_value": (0.0, number(0.0)),
            "eps": (1e-10, number(0.0)),
            "maximize": (False, read_flag),
        },
        build=_build,
        refused=clipping_refused(),
    )


def _build(values: Mapping[str, Any]) -> tuple[Factory, Hyperparams]:
    def factory(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
        return optax.chain(
            *maximized(values["maximize"]),
            # Before the sums, so that they include the decay with the gradient, as in PyTorch.
            optax.add_decayed_weights(weight_decay),
            scale_by_total_squares(
                values["initial_accumulator_value"], values["eps"], values["lr_decay"]
            ),
            optax.scale_by_learning_rate(learning_rate),
        )

    return factory, {"learning_rate": values["lr"], "weight_decay": values["weight_decay"]}
