"""Adagrad with PyTorch's parameters."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import number, read_flag, setting

from ._adam import maximized
from ._for_model import Matrices
from ._recipe import Factory, Hyperparams, OptimizerParams


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


@dataclass(frozen=True)
class Adagrad(OptimizerParams):
    """Adagrad, as in PyTorch."""

    lr: float = setting(0.01, number(0.0))
    lr_decay: float = setting(0.0, number(0.0))
    weight_decay: float = setting(0.0, number(0.0))
    initial_accumulator_value: float = setting(0.0, number(0.0))
    eps: float = setting(1e-10, number(0.0))
    maximize: bool = setting(False, read_flag)

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""

        def factory(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
            return optax.chain(
                *maximized(self.maximize),
                # Before the sums, so that they include the decay with the gradient, as in PyTorch.
                optax.add_decayed_weights(weight_decay),
                scale_by_total_squares(self.initial_accumulator_value, self.eps, self.lr_decay),
                optax.scale_by_learning_rate(learning_rate),
            )

        return factory, {"learning_rate": self.lr, "weight_decay": self.weight_decay}
