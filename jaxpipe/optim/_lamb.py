"""LAMB with DeepSpeed's parameters."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import PyTree
from jaxpipe.config import number, read_flag
from jaxpipe.errors import ConfigError

from ._adam import scale_by_moments
from ._check import betas
from ._recipe import SECTION, Factory, Hyperparams, Recipe, clipping_refused


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


def lamb_recipe() -> Recipe:
    """The recipe of `Lamb`."""
    return Recipe(
        params={
            "lr": (0.001, number(0.0)),
            "bias_correction": (True, read_flag),
            "betas": ((0.9, 0.999), betas),
            "eps": (1e-8, number(0.0)),
            "eps_inside_sqrt": (False, read_flag),
            "weight_decay": (0.0, number(0.0)),
            "max_coeff": (10.0, number(0.0)),
            "min_coeff": (0.01, number(0.0)),
        },
        build=_build,
        refused=clipping_refused() | {"amsgrad": ("LAMB has no such variant", "Remove the key")},
        cycled="b1",
    )


def _build(values: Mapping[str, Any]) -> tuple[Factory, Hyperparams]:
    low = values["min_coeff"]
    high = values["max_coeff"]
    if low > high:
        path = f"{SECTION}.min_coeff"
        message = f"{path} must be at most max_coeff={high}, but got {path}={low}. Swap the two."
        raise ConfigError(message, paths=[path])

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
                values["eps"],
                bias_correction=values["bias_correction"],
                eps_inside_sqrt=values["eps_inside_sqrt"],
            ),
            # Before the coefficient, so that its norm covers the whole step, including the decay.
            optax.add_decayed_weights(weight_decay),
            scale_by_lamb_coefficient(low, high),
            optax.scale_by_learning_rate(learning_rate),
        )

    b1, b2 = values["betas"]
    return factory, {
        "learning_rate": values["lr"],
        "b1": b1,
        "b2": b2,
        "weight_decay": values["weight_decay"],
    }
