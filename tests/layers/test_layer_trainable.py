"""Which parameters a model trains: patterns, predicates and trees, and what is wrong with them."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import PipelineModule

X = jnp.ones((2, 3))


def frozen(trainable: Any) -> set[str]:
    model = PipelineModule(
        [nn.Dense(3), nn.LayerNorm(), nn.Dense(2)], num_stages=1, trainable=trainable
    )
    return {"/".join(path[1:]) for path in model.trace(X).frozen}


ALL = {f"{layer}/{name}" for layer in ("0_Dense", "2_Dense") for name in ("kernel", "bias")}
ALL |= {"1_LayerNorm/scale", "1_LayerNorm/bias"}


@pytest.mark.parametrize(
    ("trainable", "trained"),
    [
        (None, ALL),
        ("", ALL),
        ("kernel$", {"0_Dense/kernel", "2_Dense/kernel"}),
        (["LayerNorm", "2_Dense/bias"], {"1_LayerNorm/scale", "1_LayerNorm/bias", "2_Dense/bias"}),
        (lambda path: path.startswith("layers/0_"), {"0_Dense/kernel", "0_Dense/bias"}),
        (
            {
                "layers": {
                    "0_Dense": False,
                    "1_LayerNorm": {"scale": np.True_, "bias": False},
                    "2_Dense": True,
                }
            },
            {"1_LayerNorm/scale", "2_Dense/kernel", "2_Dense/bias"},
        ),
    ],
)
def test_what_is_trained(trainable: Any, trained: set[str]) -> None:
    assert frozen(trainable) == ALL - trained
