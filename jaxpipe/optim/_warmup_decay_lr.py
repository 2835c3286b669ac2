"""A rate that rises, then falls linearly."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import number, required, setting

from ._base import LRSchedule, iteration_of
from ._check import integer
from ._warmup import effective_steps, read_warmup_type, warmup_fraction


@dataclass(frozen=True)
class WarmupDecayLR(LRSchedule):
    """Rise as `WarmupLR` does, then fall linearly to `warmup_min_lr`, and stay there.

    The fall ends at iteration `total_num_steps`.

    After a warm-up of `n` steps, at iteration `i` of `T`, the rate is
    `min + (max - min) * max(0, (T - i) / max(1, T - n))`.

    Args:
        total_num_steps: Updates in the run. If it is below `warmup_num_steps`, the rate falls to
            the minimum as soon as the warm-up is over.
        warmup_min_lr: The rate to start from and to end with.
        warmup_max_lr: The rate to reach.
        warmup_num_steps: Length of the warm-up; 0 and 1 count as 2.
        warmup_type: `"log"` or `"linear"`.
        last_batch_iteration: Iteration before the first update.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range.

    Example:
        >>> schedule = WarmupDecayLR(6, 0.0, 0.1, 2, "linear")
        >>> [round(float(schedule(count)), 3) for count in range(9)]
        [0.0, 0.0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]
    """

    total_num_steps: int = required(integer(1))
    warmup_min_lr: float = setting(0.0, number(0.0))
    warmup_max_lr: float = setting(0.001, number(0.0))
    warmup_num_steps: int = setting(1000, integer(0))
    warmup_type: str = setting("log", read_warmup_type)
    last_batch_iteration: int = setting(-1, integer(-1))

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate after `count` updates."""
        steps = effective_steps(self.warmup_num_steps)
        iteration = iteration_of(count, self.last_batch_iteration)
        left = jnp.maximum(self.total_num_steps - iteration, 0).astype(jnp.float32)
        falling = left / max(1, self.total_num_steps - steps)
        share = jnp.where(
            iteration < steps, warmup_fraction(iteration, steps, self.warmup_type), falling
        )
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * share
