"""A rate that rises, then falls along a cosine."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import number, required, setting

from ._base import LRSchedule, iteration_of
from ._check import integer
from ._warmup import effective_steps, read_warmup_type, warmup_fraction


@dataclass(frozen=True)
class WarmupCosineLR(LRSchedule):
    """Rise to the optimiser's rate, then fall to `cos_min_ratio` of it along half a cosine.

    The parameters are ratios of `lr`. During a warm-up of `n` steps the ratio rises from
    `warmup_min_ratio` to 1 as in `WarmupLR`; at iteration `i` of `T` after it, it is `r + (1 - r) *
    (1 + cos(pi * p)) / 2` with `r = cos_min_ratio` and `p = min(1, (i - n + 1) / max(1, T - n))`.

    As in DeepSpeed, the very first update has the rate 0 whatever `warmup_min_ratio` is, and the
    second has `warmup_min_ratio * lr`, so that runs can be compared update by update. A run that
    continues another one (`last_batch_iteration` of at least 0) has no update with rate 0.

    Args:
        total_num_steps: Updates in the run.
        warmup_min_ratio: Ratio to start from.
        warmup_num_steps: Length of the warm-up; 0 and 1 count as 2.
        cos_min_ratio: Ratio to end with.
        warmup_type: `"log"` or `"linear"`.
        last_batch_iteration: Iteration before the first update.
        lr: The optimiser's own rate.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range.

    Example:
        >>> warmup = dict(warmup_num_steps=2, warmup_type="linear")
        >>> schedule = WarmupCosineLR(6, **warmup, cos_min_ratio=0.0, lr=1.0)
        >>> [round(float(schedule(count)), 3) for count in range(8)]
        [0.0, 0.0, 0.5, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    total_num_steps: int = required(integer(1))
    warmup_min_ratio: float = setting(0.0, number(0.0))
    warmup_num_steps: int = setting(1000, integer(0))
    cos_min_ratio: float = setting(0.0001, number(0.0))
    warmup_type: str = setting("log", read_warmup_type)
    last_batch_iteration: int = setting(-1, integer(-1))
    lr: float = setting(0.001, number(0.0), is_hidden=True)

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate after `count` updates."""
        steps = effective_steps(self.warmup_num_steps)
        iteration = iteration_of(count, self.last_batch_iteration)
        rising = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * warmup_fraction(
            iteration, steps, self.warmup_type
        )
        gone = jnp.maximum(iteration - steps + 1, 0).astype(jnp.float32)
        progress = jnp.minimum(gone / max(1, self.total_num_steps - steps), 1)
        falling = (
            self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + jnp.cos(math.pi * progress)) / 2
        )
        ratio = jnp.where(iteration < steps, rising, falling)
        return self.lr * jnp.where(iteration < 0, jnp.float32(0), ratio)
