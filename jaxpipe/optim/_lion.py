"""Lion with DeepSpeed's parameters."""

from dataclasses import dataclass
from typing import Any, ClassVar

import optax

from jaxpipe.config import number, setting

from ._check import read_betas
from ._for_model import Matrices
from ._recipe import Factory, Hyperparams, OptimizerParams


@dataclass(frozen=True)
class Lion(OptimizerParams):
    """Lion, as in its paper."""

    cycled: ClassVar[str | None] = "b1"

    lr: float = setting(0.001, number(0.0))
    betas: tuple[float, float] = setting((0.9, 0.999), read_betas)
    weight_decay: float = setting(0.0, number(0.0))

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""

        def factory(
            learning_rate: Any, b1: Any, b2: Any, weight_decay: Any
        ) -> optax.GradientTransformation:
            return optax.chain(
                # If the interpolated gradient is exactly 0, a parameter does not change, as in the
                # paper. DeepSpeed's kernel adds the learning rate to it.
                optax.scale_by_lion(b1, b2),
                optax.add_decayed_weights(weight_decay),
                optax.scale_by_learning_rate(learning_rate),
            )

        b1, b2 = self.betas
        return factory, {
            "learning_rate": self.lr,
            "b1": b1,
            "b2": b2,
            "weight_decay": self.weight_decay,
        }
