"""A rate that rises, then stays constant."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import number, optional, setting
from jaxpipe.errors import ConfigError

from ._base import LRSchedule, iteration_of
from ._check import integer
from ._warmup import effective_steps, read_warmup_type, warmup_fraction


@dataclass(frozen=True)
class WarmupLR(LRSchedule):
    """Rise from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps`, then stay there.

    At iteration `i` of a warm-up of `n` steps the rate is `min + (max - min) * log(i + 1) /
    log(n)`, or with `warmup_type="linear"` `min + (max - min) * i / n`. The first two updates have
    `warmup_min_lr`.

    An unknown `warmup_type` is an error; DeepSpeed treats it as `"log"`.

    Args:
        warmup_min_lr: The rate to start from.
        warmup_max_lr: The rate to reach; None uses `lr`.
        warmup_num_steps: Length of the warm-up; 0 and 1 count as 2.
        warmup_type: `"log"` or `"linear"`.
        last_batch_iteration: Iteration before the first update.
        lr: The optimiser's own rate.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range, or there is no rate to reach.

    Example:
        >>> schedule = WarmupLR(0.0, 0.1, 4, "linear")
        >>> [round(float(schedule(count)), 3) for count in range(7)]
        [0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    """

    warmup_min_lr: float = setting(0.0, number(0.0))
    warmup_max_lr: float | None = setting(None, optional(number(0.0)))
    warmup_num_steps: int = setting(1000, integer(0))
    warmup_type: str = setting("log", read_warmup_type)
    last_batch_iteration: int = setting(-1, integer(-1))
    lr: float | None = setting(None, optional(number(0.0)), is_hidden=True)

    def check(self) -> Iterable[ConfigError]:
        """Refuse a warm-up to no rate."""
        if self.warmup_max_lr is None and self.lr is None:
            rule = "a number if the optimizer has no lr of its own"
            yield self._wrong("warmup_max_lr", rule, "Set warmup_max_lr, or optimizer.params.lr")

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate after `count` updates."""
        top = self.warmup_max_lr if self.warmup_max_lr is not None else self.lr
        steps = effective_steps(self.warmup_num_steps)
        iteration = iteration_of(count, self.last_batch_iteration)
        risen = jnp.where(
            iteration < steps, warmup_fraction(iteration, steps, self.warmup_type), jnp.float32(1)
        )
        return self.warmup_min_lr + ((top or 0.0) - self.warmup_min_lr) * risen
