"""A rate that rises without limit, to find the largest rate that trains."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import number, read_flag, setting

from ._base import LRSchedule, iteration_of
from ._check import integer


@dataclass(frozen=True)
class LRRangeTest(LRSchedule):
    """Rise without limit, linearly or in steps, to find the largest rate that still trains.

    At iteration `i` the rate is `min_lr * (1 + step_rate * (i + 1) / step_size)`, with the quotient
    rounded down if `lr_range_test_staircase`.

    Args:
        lr_range_test_min_lr: The rate of the first update.
        lr_range_test_step_size: Updates per step.
        lr_range_test_step_rate: Growth per step, as a multiple of `lr_range_test_min_lr`.
        lr_range_test_staircase: Whether the rate stays constant within a step.
        last_batch_iteration: Iteration before the first update.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range.

    Example:
        >>> schedule = LRRangeTest(0.5, 2, 1.0)
        >>> [float(schedule(count)) for count in range(5)]
        [0.5, 0.75, 1.0, 1.25, 1.5]

    Reference:
        L. N. Smith, A disciplined approach to neural network hyper-parameters: Part 1 (2018).
    """

    lr_range_test_min_lr: float = setting(0.001, number(0.0))
    lr_range_test_step_size: int = setting(2000, integer(1))
    lr_range_test_step_rate: float = setting(1.0, number(0.0))
    lr_range_test_staircase: bool = setting(False, read_flag)
    last_batch_iteration: int = setting(-1, integer(-1))

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate after `count` updates."""
        batches = iteration_of(count, self.last_batch_iteration) + 1
        if self.lr_range_test_staircase:
            steps = (batches // self.lr_range_test_step_size).astype(jnp.float32)
        else:
            steps = batches.astype(jnp.float32) / self.lr_range_test_step_size
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * steps)
