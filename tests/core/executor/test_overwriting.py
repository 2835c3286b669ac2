"""Layers whose variables are replaced with their gradient.

The scales of Flax's FP8 products are such.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _refusals import assert_refused
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.errors import LayerError

X = np.ones((8, 8), np.float32)


class Quantized(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dot_general=Fp8DirectDotGeneralOp(amax_history_length=4))(x)


@pytest.mark.parametrize("stages", [1, 2])
def test_they_are_refused_by_name(stages: int) -> None:
    model = PipelineModule(
        [LayerSpec(nn.Dense, 8), LayerSpec(Quantized)], num_stages=stages, loss_fn=optax.l2_loss
    )
    words = "layer 1_Quantized must keep only ... got '_overwr ... Fp8 ... amax_history' and 5 more"
    config, example = {"train_micro_batch_size_per_gpu": 1}, (X[: 8 // stages],) * 2
    given = {"model": model, "config": config, "example_batch": example}
    assert_refused(LayerError, f"{words}, which ... train in bf", jaxpipe.initialize, **given)


def test_the_sequential_model_has_them() -> None:
    model = PipelineModule([LayerSpec(Quantized)], num_stages=1)
    key = jax.random.key(0)
    params, collections = model.init(key, X), model.init_collections(key, X)

    def loss(collections: dict) -> jax.Array:
        return jnp.sum(model.call(params, collections, X, train=True, key=key)[0])

    scales = jax.grad(loss)(collections)["0_Quantized"]["_overwrite_with_gradient"][
        "Fp8DirectDotGeneralOp_0"
    ]
    assert scales["input_amax_history"][0] == 1
