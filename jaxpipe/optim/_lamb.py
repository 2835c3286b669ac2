"""LAMB with DeepSpeed's parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Refusal, Unused, number, read_flag, setting
from jaxpipe.errors import ConfigError

from ._adam import scale_by_moments
from ._check import read_betas
from ._for_model import Matrices
from ._recipe import NOT_PARAMS, Factory, Hyperparams, OptimizerParams


def scale_by_lamb_coefficient(min_coeff: float, max_coeff: float) -> optax.GradientTransformation:
    """Scale each update by the norm of its parameter divided by its own norm, within limits."""
    # `optax.scale_by_trust_ratio` limits the norms, not their ratio.

    def scaled(update: jax.Array, param: jax.Array) -> jax.Array:
        # In float32 for any dtype of the leaf: a bfloat16 sum stops growing after a few hundred
        # equal squares.
        norms = [
            jnp.sqrt(jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))) for x in (param, update)
        ]
        # If one of the norms is 0, the scale is 1, whatever the limits are.
        usable = (norms[0] != 0) & (norms[1] != 0)
        # Replace the divisor and not only the quotient: `jnp.where` computes both sides, and
        # jax_debug_nans fails at 0 / 0.
        ratio = norms[0] / jnp.where(usable, norms[1], 1)
        return update * jnp.where(usable, jnp.clip(ratio, min_coeff, max_coeff), 1).astype(
            update.dtype
        )

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        return jax.tree.map(scaled, updates, params), state

    return optax.GradientTransformation(optax.init_empty_state, update)


@dataclass(frozen=True)
class Lamb(OptimizerParams):
    """LAMB: Adam's step, scaled to the norm of each parameter."""

    other_keys: ClassVar[Mapping[str, Unused | Refusal]] = MappingProxyType(
        {**NOT_PARAMS, "amsgrad": Refusal("LAMB has no such variant", "Remove the key", off=())}
    )
    cycled: ClassVar[str | None] = "b1"

    lr: float = setting(0.001, number(0.0))
    bias_correction: bool = setting(True, read_flag)
    betas: tuple[float, float] = setting((0.9, 0.999), read_betas)
    eps: float = setting(1e-8, number(0.0))
    eps_inside_sqrt: bool = setting(False, read_flag)
    weight_decay: float = setting(0.0, number(0.0))
    max_coeff: float = setting(10.0, number(0.0))
    min_coeff: float = setting(0.01, number(0.0))

    def check(self) -> Iterable[ConfigError]:
        """Refuse limits without anything between them."""
        if self.min_coeff > self.max_coeff:
            yield self._wrong("min_coeff", f"at most max_coeff={self.max_coeff}", "Swap the two")

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""

        def factory(
            learning_rate: Any, b1: Any, b2: Any, weight_decay: Any
        ) -> optax.GradientTransformation:
            return optax.chain(
                # The bias correction is applied to the two averages, as in the paper and in
                # DeepSpeed's later releases. DeepSpeed up to 0.19.8 multiplied the step by it after
                # computing the norms.
                scale_by_moments(
                    b1,
                    b2,
                    self.eps,
                    bias_correction=self.bias_correction,
                    eps_inside_sqrt=self.eps_inside_sqrt,
                ),
                # Before the coefficient, so that its norm covers the whole step with the decay.
                optax.add_decayed_weights(weight_decay),
                scale_by_lamb_coefficient(self.min_coeff, self.max_coeff),
                optax.scale_by_learning_rate(learning_rate),
            )

        b1, b2 = self.betas
        return factory, {
            "learning_rate": self.lr,
            "b1": b1,
            "b2": b2,
            "weight_decay": self.weight_decay,
        }
