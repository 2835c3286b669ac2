"""The warm-up that three schedules share."""

import math

import jax
import jax.numpy as jnp

from jaxpipe.config import one_of_exactly

read_warmup_type = one_of_exactly("log", "linear")


def effective_steps(warmup_num_steps: int) -> int:
    """The length of a warm-up: at least two, because of the logarithm."""
    return max(2, warmup_num_steps)


def warmup_fraction(iteration: jax.Array, num_steps: int, warmup_type: str) -> jax.Array:
    """Progress of a warm-up, a float32 scalar, 0 up to DeepSpeed's iteration 0."""
    reached = jnp.maximum(iteration, 0).astype(jnp.float32)
    if warmup_type == "linear":
        return reached / num_steps
    return jnp.log1p(reached) / math.log(num_steps)
