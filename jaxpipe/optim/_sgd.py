"""Stochastic gradient descent with PyTorch's parameters."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from jaxpipe.config import number, read_flag
from jaxpipe.errors import ConfigError

from ._adam import maximized
from ._recipe import SECTION, Factory, Hyperparams, Recipe, clipping_refused


def sgd_recipe() -> Recipe:
    """The recipe of `SGD`."""
    return Recipe(
        params={
            "lr": (0.001, number(0.0)),
            "momentum": (0.0, number(0.0)),
            "dampening": (0.0, number()),
            "weight_decay": (0.0, number(0.0)),
            "nesterov": (False, read_flag),
            "maximize": (False, read_flag),
        },
        build=_build,
        refused=clipping_refused(),
        cycled="momentum",
    )


def _build(values: Mapping[str, Any]) -> tuple[Factory, Hyperparams]:
    dampening = values["dampening"]
    nesterov = values["nesterov"]
    if nesterov and (values["momentum"] == 0 or dampening != 0):
        path = f"{SECTION}.nesterov"
        raise ConfigError(
            f"{path} must be false without a momentum or with a dampening, but got {path}=True, "
            f"momentum={values['momentum']:g} and dampening={dampening:g}. Set {SECTION}.momentum "
            "to for instance 0.9, and leave dampening out.",
            paths=[path],
        )

    def plain(learning_rate: Any, weight_decay: Any) -> optax.GradientTransformation:
        return _chain(values, learning_rate, weight_decay, optax.identity())

    def with_momentum(
        learning_rate: Any, momentum: Any, weight_decay: Any
    ) -> optax.GradientTransformation:
        trace = optax.trace(momentum, nesterov)
        if dampening:
            # PyTorch starts the sum with the first gradient itself, not with 0 plus a dampened
            # share of the gradient.
            dampened = optax.scale_by_schedule(
                lambda count: jnp.where(count == 0, 1.0, 1.0 - dampening)
            )
            trace = optax.chain(dampened, trace)
        return _chain(values, learning_rate, weight_decay, trace)

    hyperparams = {"learning_rate": values["lr"], "weight_decay": values["weight_decay"]}
    if values["momentum"] == 0:
        return plain, hyperparams
    return with_momentum, hyperparams | {"momentum": values["momentum"]}


def _chain(
    values: Mapping[str, Any],
    learning_rate: Any,
    weight_decay: Any,
    momentum: optax.GradientTransformation,
) -> optax.GradientTransformation:
    return optax.chain(
        *maximized(values["maximize"]),
        # Before the momentum, so that it sums the decay with the gradient, as in PyTorch.
        optax.add_decayed_weights(weight_decay),
        momentum,
        optax.scale_by_learning_rate(learning_rate),
    )
