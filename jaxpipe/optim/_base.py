"""Base of DeepSpeed's learning-rate schedules."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import Section

SECTION = "scheduler.params"


@dataclass(frozen=True)
class LRSchedule(Section, ABC):
    """A learning rate as a function of the number of updates so far.

    A subclass is a frozen dataclass whose fields are the parameters of DeepSpeed's schedule of the
    same name. It is also an optax schedule: called with a count, traced or not, it returns the rate
    of the next update.

    DeepSpeed sets the start rate when it makes a schedule and steps the schedule after each update.
    An update therefore has the rate of iteration `last_batch_iteration + count`, where
    `last_batch_iteration` is -1 unless the run continues another one. Iteration -1 has the start
    rate, and so does iteration 0 of a warm-up.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range.
    """

    path: ClassVar[str] = SECTION

    @abstractmethod
    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate.

        Args:
            count: Number of updates so far, 0 for the first update.

        Returns:
            A float32 scalar.
        """


def iteration_of(count: ArrayLike, last_batch_iteration: int) -> jax.Array:
    """DeepSpeed's `last_batch_iteration` during an update, an int32 scalar.

    `count` is the number of updates so far, and `last_batch_iteration` the value before the first.
    """
    return jnp.asarray(count, jnp.int32) + last_batch_iteration
