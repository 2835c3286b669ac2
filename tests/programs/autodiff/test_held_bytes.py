"""Bytes held for the backward of activations, norms, embeddings and attention.

The same on every JAX.

JAX changes derivatives from release to release, and what a primitive gives that nobody has sorted
is held instead of computed again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpipe.programs.autodiff import Residuals

ROWS, WIDTH = 16, 8
HIDDEN = 4 * WIDTH
STATISTIC = 1 / HIDDEN  # one number a row


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)


def angles(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    phase = jnp.arange(x.shape[0])[:, None] * jnp.arange(1.0, 1 + x.shape[1] // 2)[None]
    return jnp.cos(phase), jnp.sin(phase)


def rotary_halves(x: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = angles(x)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rotary_stacked(x: jax.Array) -> jax.Array:
    a, b = x[:, ::2], x[:, 1::2]
    cos, sin = angles(x)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def rotary_unpacked(x: jax.Array) -> jax.Array:
    a, b = x.reshape(x.shape[0], -1, 2).transpose(2, 0, 1)
    cos, sin = angles(x)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def repeated(x: jax.Array) -> jax.Array:
    return jnp.tile(jnp.sin(x[:, : x.shape[1] // 2]), (1, 2))


def gated(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: activation(x[:, : HIDDEN // 2]) * x[:, HIDDEN // 2 :]


# In units of the hidden values, beside the input of the first product.
HELD: dict[str, tuple[Callable[[jax.Array], jax.Array], float]] = {
    "relu": (jax.nn.relu, 1.0),
    "sigmoid": (jax.nn.sigmoid, 1.0),
    "tanh": (jnp.tanh, 1.0),
    "gelu, tanh": (jax.nn.gelu, 1.0),
    "gelu, exact": (lambda x: jax.nn.gelu(x, approximate=False), 1.0),
    "silu": (jax.nn.silu, 1.0),
    "softplus": (jax.nn.softplus, 1.0),
    "elu": (jax.nn.elu, 1.0),
    "selu": (jax.nn.selu, 1.0),
    "celu": (jax.nn.celu, 1.0),
    "mish": (jax.nn.mish, 1.0),
    "relu squared": (lambda x: jax.nn.relu(x) ** 2, 1.0),
    "hard swish": (jax.nn.hard_swish, 1.0),
    "soft sign": (jax.nn.soft_sign, 1.0),
    "soft cap": (lambda x: 30 * jnp.tanh(x / 30), 1.0),
    "log2": (lambda x: jnp.log2(1 + x**2), 1.0),
    "sinc": (jnp.sinc, 1.0),
    "erf": (jax.lax.erf, 1.0),
    "erfc": (jax.lax.erfc, 1.0),
    "rotary, halves": (rotary_halves, 1.0),
    "rotary, stacked": (rotary_stacked, 1.0),
    "rotary, unpacked": (rotary_unpacked, 1.0),
    "tile": (repeated, 0.5),
    "swiglu": (gated(jax.nn.silu), 1.0),
    "geglu, tanh": (gated(jax.nn.gelu), 1.0),
    "geglu, exact": (gated(lambda x: jax.nn.gelu(x, approximate=False)), 1.0),
    "rms norm": (rms_norm, 1.0 + STATISTIC),
    "layer norm": (layer_norm, 1.0 + STATISTIC),
    "softmax": (jax.nn.softmax, 1.0 + STATISTIC),
    "log softmax": (jax.nn.log_softmax, 1.0 + STATISTIC),
    "safe norm": (
        lambda x: x / optax.safe_norm(x, 1e-3, axis=-1, keepdims=True),
        1.0 + 3 * STATISTIC,
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_function_between_two_products_holds_its_input(name: str) -> None:
    function, wanted = HELD[name]

    def model(params: Any, x: jax.Array, context: Any) -> Any:
        y = function(x @ params[0])
        return y @ params[1][: y.shape[-1]], ()

    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH))
    ]
    found = sum(leaf.size for leaf in Residuals(model, tuple(structs[:2]), structs[2], ()).structs)
    assert found / (ROWS * HIDDEN) - WIDTH / HIDDEN == pytest.approx(wanted, abs=0.001)
