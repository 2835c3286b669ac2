"""The rising part that three schedules share."""

import math

import jax
import jax.numpy as jnp

from jaxpipe.config import Reader

from ._check import one_of

WARMUP_TYPES = ("log", "linear")


def warmup_type_reader() -> Reader:
    """A reader of `warmup_type`."""
    return one_of(*WARMUP_TYPES)


def effective_steps(warmup_num_steps: int) -> int:
    """The length of a warm-up: two at least, as the logarithm asks."""
    return max(2, warmup_num_steps)


def warmup_fraction(iteration: jax.Array, num_steps: int, warmup_type: str) -> jax.Array:
    """Progress of a warm-up.

    Args:
        iteration: DeepSpeed's iteration; below 0 counts as 0.
        num_steps: Its length.
        warmup_type: `"linear"`: `i / n`; `"log"`: `log(i + 1) / log(n)`.

    Returns:
        A float32 scalar, 0 at iteration 0.
    """
    reached = jnp.maximum(iteration, 0).astype(jnp.float32)
    if warmup_type == "linear":
        return reached / num_steps
    return jnp.log1p(reached) / math.log(num_steps)
