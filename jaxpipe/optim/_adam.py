"""Adam and AdamW with DeepSpeed's and PyTorch's parameters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import number, optional, read_flag, setting
from jaxpipe.errors import ConfigError

from ._check import read_betas
from ._for_model import Matrices
from ._recipe import Factory, Hyperparams, OptimizerParams


class MomentsState(NamedTuple):
    """Averages of the gradients, `mu`, and of their squares, `nu`, after `step` updates.

    `nu_max` is the largest `nu` so far with AMSGrad, otherwise an empty tuple.
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    nu_max: PyTree


def scale_by_moments(
    b1: Any,
    b2: Any,
    eps: float,
    *,
    bias_correction: bool = True,
    amsgrad: bool = False,
    eps_inside_sqrt: bool = False,
) -> optax.GradientTransformation:
    """Adam's direction, `mu / (sqrt(nu) + eps)`, in the variants of DeepSpeed and PyTorch."""
    # Optax's `scale_by_adam` cannot leave out the bias correction, loses digits in it (see
    # `average_weight`), and widens bfloat16 moments if `b1` and `b2` are arrays in the state. Its
    # `scale_by_amsgrad` corrects the largest `nu` differently: PyTorch takes the maximum before
    # the correction.

    def init(params: PyTree) -> MomentsState:
        mu = optax.tree.zeros_like(params)
        nu = optax.tree.zeros_like(params)
        return MomentsState(
            jnp.zeros([], jnp.int32), mu, nu, optax.tree.zeros_like(params) if amsgrad else ()
        )

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, MomentsState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.step))
        # Cast back: a decay rate in the state is a float32 array, which would widen bfloat16
        # moments.
        mu = jax.tree.map(lambda g, m: (b1 * m + (1 - b1) * g).astype(m.dtype), updates, state.mu)
        # Use the conjugate, so that a complex gradient is squared to its magnitude.
        nu = jax.tree.map(
            lambda g, v: (b2 * v + (1 - b2) * g * jnp.conj(g)).astype(v.dtype), updates, state.nu
        )
        largest = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else nu
        weights = [
            average_weight(b, count) if bias_correction else jnp.float32(1) for b in (b1, b2)
        ]

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            corrected = v / weights[1]
            root = jnp.sqrt(corrected + eps) if eps_inside_sqrt else jnp.sqrt(corrected) + eps
            return m / weights[0] / root

        return jax.tree.map(direction, mu, largest), MomentsState(
            count, mu, nu, largest if amsgrad else ()
        )

    return optax.GradientTransformation(init, update)


def average_weight(decay: Any, count: jax.Array) -> jax.Array:
    """Sum of the weights of an exponential average, `1 - decay**count`, a float32 scalar."""
    # `1 - decay**count` would round the power to float32 first, and then cancel most of its digits
    # if `decay` is close to 1.
    return -jnp.expm1(count.astype(jnp.float32) * jnp.log1p(jnp.asarray(decay, jnp.float32) - 1))


def maximized(maximize: bool) -> list[optax.GradientTransformation]:
    """First part of a chain: negates gradients for PyTorch's `maximize`, otherwise empty."""
    return [optax.scale(-1.0)] if maximize else []


@dataclass(frozen=True)
class Adam(OptimizerParams):
    """Adam, by default with decoupled weight decay."""

    cycled: ClassVar[str | None] = "b1"

    lr: float = setting(0.001, number(0.0))
    betas: tuple[float, float] = setting((0.9, 0.999), read_betas)
    eps: float = setting(1e-8, number(0.0))
    weight_decay: float | None = setting(None, optional(number(0.0)))
    adam_w_mode: bool = setting(True, read_flag)
    bias_correction: bool = setting(True, read_flag)
    torch_adam: bool = setting(False, read_flag)
    amsgrad: bool = setting(False, read_flag)
    maximize: bool = setting(False, read_flag)

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""
        decay = self.weight_decay
        if decay is None:
            # `torch_adam` is PyTorch's own AdamW, which decays by 0.01 by default. DeepSpeed's
            # kernels do not.
            decay = 0.01 if self.torch_adam and self.adam_w_mode else 0.0

        def factory(
            learning_rate: Any, b1: Any, b2: Any, weight_decay: Any
        ) -> optax.GradientTransformation:
            direction = scale_by_moments(
                b1,
                b2,
                self.eps,
                bias_correction=self.bias_correction,
                amsgrad=self.amsgrad,
            )
            decayed = optax.add_decayed_weights(weight_decay)
            # AdamW adds the decay to Adam's direction. In Adam, the decay is part of the gradient
            # that the moments average.
            parts = [direction, decayed] if self.adam_w_mode else [decayed, direction]
            return optax.chain(
                *maximized(self.maximize), *parts, optax.scale_by_learning_rate(learning_rate)
            )

        b1, b2 = self.betas
        return factory, {"learning_rate": self.lr, "b1": b1, "b2": b2, "weight_decay": decay}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay only."""

    def check(self) -> Iterable[ConfigError]:
        """Refuse weight decay that is added to the gradient."""
        if not self.adam_w_mode:
            rule = "true with optimizer.type='AdamW'"
            repair = "Use optimizer.type='Adam' for weight decay that is added to the gradient"
            yield self._wrong("adam_w_mode", rule, repair)
