"""Stochastic gradient descent with PyTorch's parameters."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import optax

from jaxpipe.config import number, read_flag, setting
from jaxpipe.errors import ConfigError

from ._adam import maximized
from ._for_model import Matrices
from ._recipe import SECTION, Factory, Hyperparams, OptimizerParams


@dataclass(frozen=True)
class SGD(OptimizerParams):
    """Stochastic gradient descent, by default without momentum."""

    cycled: ClassVar[str | None] = "momentum"

    lr: float = setting(0.001, number(0.0))
    momentum: float = setting(0.0, number(0.0))
    dampening: float = setting(0.0, number())
    weight_decay: float = setting(0.0, number(0.0))
    nesterov: bool = setting(False, read_flag)
    maximize: bool = setting(False, read_flag)

    def check(self) -> Iterable[ConfigError]:
        """Refuse Nesterov's variant of no momentum."""
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            given = f"momentum={self.momentum:g} and dampening={self.dampening:g}"
            repair = f"Set {SECTION}.momentum to for instance 0.9, and leave dampening out"
            yield self._wrong("nesterov", f"false with {given}", repair)

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""
        dampening = self.dampening

        def plain(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
            return self._chain(learning_rate, weight_decay, optax.identity())

        def with_momentum(
            learning_rate: Any, momentum: Any, weight_decay: Any
        ) -> optax.GradientTransformation:
            trace = optax.trace(momentum, self.nesterov)
            if dampening:
                # PyTorch starts the sum with the first gradient itself, not with 0 plus a dampened
                # share of the gradient.
                dampened = optax.scale_by_schedule(
                    lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening)
                )
                trace = optax.chain(dampened, trace)
            return self._chain(learning_rate, weight_decay, trace)

        hyperparams = {"learning_rate": self.lr, "weight_decay": self.weight_decay}
        if self.momentum == 0:
            return plain, hyperparams
        return with_momentum, hyperparams | {"momentum": self.momentum}

    def _chain(
        self,
        learning_rate: Any,
        weight_decay: Any,
        momentum: optax.GradientTransformation,
    ) -> optax.GradientTransformation:
        return optax.chain(
            *maximized(self.maximize),
            # Before the momentum, so that it sums the decay with the gradient, as in PyTorch.
            optax.add_decayed_weights(weight_decay),
            momentum,
            optax.scale_by_learning_rate(learning_rate),
        )
