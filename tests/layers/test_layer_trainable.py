"""Which parameters a model trains: patterns, predicates and trees, and what is wrong with them."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe import PipelineModule
from jaxpipe.errors import LayerError

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


@pytest.mark.parametrize(
    ("trainable", "match"),
    [
        ("a(", r"must be regular expressions, but got 'a\(': .* Escape literal text"),
        (
            {"layers": {"0_Dense": 1}},
            r"True or False as its leaves, but got int at layers/0_Dense. Write True",
        ),
    ],
)
def test_what_is_no_selection_is_refused_at_once(trainable: Any, match: str) -> None:
    with pytest.raises(LayerError, match=match):
        PipelineModule([nn.Dense(3)], num_stages=1, trainable=trainable)


@pytest.mark.parametrize(
    ("trainable", "match"),
    [
        ("kernle", r"pattern 'kernle', which matches none of 6. The nearest are: layers/._"),
        (["kernel", "lora"], r"pattern 'lora', which matches none of 6. The nearest are:"),
        (
            {"layers": {"0_Dens": True}},
            r"path layers/0_Dens, which matches none of 6. The nearest are: layers/0_Dense",
        ),
        (
            {"layers": {"0_Dense": True}},
            r"nothing for layers/1_LayerNorm/bias and 3 more. A boolean may cover",
        ),
        (
            lambda _: False,
            r"but got all 6 parameters frozen. Let it be true of some, such as layers/0_Dense/bias",
        ),
        ({"layers": False}, r"but got all 6 parameters frozen"),
        ([], r"but got all 6 parameters frozen"),
    ],
)
def test_what_fits_no_parameter_or_all_is_refused(trainable: Any, match: str) -> None:
    with pytest.raises(LayerError, match=match):
        frozen(trainable)
