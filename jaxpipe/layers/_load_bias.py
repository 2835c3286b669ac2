"""The mark of parameters that a load moves, and not the optimiser."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree

from ._marks import MarkBox, Marked

_UNIT = 2.0**-80
"""What a load of 1 adds to a gradient.

A power of two keeps sums of whole numbers exact. Its square is 0 in float32, so that no norm of all
gradients changes.
"""


class LoadBias(Marked):
    """A parameter of an NNX module that a load moves, and not the optimiser; see `load_bias`."""


def load_bias(init: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the parameter of a Linen module that an initialiser makes: a load moves it.

    The optimiser does not see the parameter, and nothing casts it: it grows large compared with the
    differences that decide, which 16 bits would round away. Each step moves it by
    `pipeline.router_bias_update_rate`, down where its load in the batch is positive and up where it
    is negative. `with_load` adds to the load. In an NNX module, make a `LoadBias` in place of an
    `nnx.Param`.

    Args:
        init: The initialiser. The parameter must be in float32 or wider.

    Returns:
        An initialiser for `self.param`.

    Example:
        >>> import flax.linen as nn
        >>> class Gates(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         bias = self.param("bias", load_bias(nn.initializers.zeros), x.shape[-1:])
        ...         is_open = x + bias[None] > 0
        ...         number = is_open.sum(0)
        ...         return with_load(jnp.where(is_open, x, 0), bias, 2 * number - len(x))
        >>> Gates().init(jax.random.key(0), jnp.ones((4, 3)))["params"]["bias"].unbox().shape
        (3,)
    """

    def marked(*args: Any, **kwargs: Any) -> MarkBox:
        return MarkBox(init(*args, **kwargs), LoadBias)

    return marked


@jax.custom_vjp
def with_load(x: PyTree, bias: jax.Array, load: jax.Array) -> PyTree:
    """Return `x`, and in a backward add to the load of a parameter that `load_bias` marks.

    The load takes the place of the parameter's gradient, which is summed over microbatches,
    replicas and devices in any case. So the sum is the load of the whole batch, and no weight of a
    microbatch, loss scale or clipping changes it. Only its sign counts.

    Args:
        x: Arrays that the layer's output depends on.
        bias: The parameter.
        load: This microbatch's load, in the shape of `bias`. Whole numbers make the sum exact.

    Returns:
        `x`.
    """
    del bias, load
    return x


def _with_load_forward(x: PyTree, bias: jax.Array, load: jax.Array) -> tuple[PyTree, jax.Array]:
    return x, jnp.asarray(load, bias.dtype) * _UNIT


def _with_load_backward(load: jax.Array, cotangent: PyTree) -> tuple[PyTree, jax.Array, None]:
    return cotangent, load, None


with_load.defvjp(_with_load_forward, _with_load_backward)
