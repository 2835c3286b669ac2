"""Lion with DeepSpeed's parameters."""

from collections.abc import Mapping
from typing import Any

import optax

from jaxpipe.config import number

from ._check import betas
from ._recipe import Factory, Hyperparams, Recipe, clipping_refused


def lion_recipe() -> Recipe:
    """The recipe of `Lion`."""
    return Recipe(
        params={
            "lr": (0.001, number(0.0)),
            "betas": ((0.9, 0.999), betas),
            "weight_decay": (0.0, number(0.0)),
        },
        build=_build,
        refused=clipping_refused(),
        cycled="b1",
    )


def _build(values: Mapping[str, Any]) -> tuple[Factory, Hyperparams]:
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

    b1, b2 = values["betas"]
    return factory, {
        "learning_rate": values["lr"],
        "b1": b1,
        "b2": b2,
        "weight_decay": values["weight_decay"],
    }
