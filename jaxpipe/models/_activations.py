"""Activation functions by Hugging Face's names."""

import functools
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}
