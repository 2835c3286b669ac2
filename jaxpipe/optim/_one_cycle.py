"""A rate that rises and falls once, while the momentum does the opposite."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import join, number, optional, read_flag, required, setting, wrong_value
from jaxpipe.errors import ConfigError

from ._base import LRSchedule, iteration_of
from ._check import integer


@dataclass(frozen=True)
class OneCycle(LRSchedule):
    """Rise linearly from `cycle_min_lr` to `cycle_max_lr`, fall back linearly, then decay.

    The momentum moves in the opposite direction.

    `k` iterations after the cycle, the rate is `cycle_min_lr / (1 + decay_lr_rate * k /
    decay_step_size)`, and the momentum `cycle_max_mom * (1 + decay_mom_rate * k /
    decay_step_size)`, which is not limited to values below 1. A stair count of n makes the values
    of that half change in n steps.

    Two peculiarities of DeepSpeed are kept, so that runs can be compared update by update. The very
    first update has `cycle_min_mom`, although the cycle begins at `cycle_max_mom`. While `b1`
    cycles, `b2` is `cycled_b2` unless `optimizer.params.betas` sets it (DeepSpeed overrides even
    that).

    Args:
        cycle_min_lr: The lowest rate of the cycle.
        cycle_max_lr: The highest rate of the cycle.
        decay_lr_rate: How fast the rate falls after the cycle; 0 means not at all.
        cycle_first_step_size: Updates of the rising half.
        cycle_second_step_size: Updates of the falling half; None means as many as the rising half.
        cycle_first_stair_count: Stairs of the rising half; 0 makes it linear.
        cycle_second_stair_count: Stairs of the falling half; None means as many as the rising half.
        decay_step_size: Updates per step of the decay; 0 means no decay.
        cycle_momentum: Whether the momentum cycles too, if the optimiser has one: the first of
            `betas`, or SGD's `momentum` if that is not 0. DeepSpeed keeps SGD's momentum constant;
            set this to false for the same behaviour.
        cycle_min_mom: The lowest momentum.
        cycle_max_mom: The highest momentum.
        decay_mom_rate: How fast the momentum grows after the cycle; 0 means not at all.
        last_batch_iteration: Iteration before the first update.

    Raises:
        ConfigError: A parameter is of the wrong type or out of range.

    Example:
        >>> schedule = OneCycle(0.0, 1.0, cycle_first_step_size=2)
        >>> [float(schedule(count)) for count in range(6)]
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]

    Reference:
        L. N. Smith, A disciplined approach to neural network hyper-parameters: Part 1 (2018).
    """

    cycled_b2: ClassVar[float] = 0.99

    cycle_min_lr: float = required(number(0.0))
    cycle_max_lr: float = required(number(0.0))
    decay_lr_rate: float = setting(0.0, number(0.0))
    cycle_first_step_size: int = setting(2000, integer(1))
    cycle_second_step_size: int | None = setting(None, optional(integer(0)))
    cycle_first_stair_count: int = setting(0, integer(0))
    cycle_second_stair_count: int | None = setting(None, optional(integer(0)))
    decay_step_size: int = setting(0, integer(0))
    cycle_momentum: bool = setting(True, read_flag)
    cycle_min_mom: float = setting(0.8, number(0.0, below=1.0))
    cycle_max_mom: float = setting(0.9, number(0.0, below=1.0))
    decay_mom_rate: float = setting(0.0, number(0.0))
    last_batch_iteration: int = setting(-1, integer(-1))

    def check(self) -> Iterable[ConfigError]:
        """Refuse stairs of a half that its computation in int32 cannot number."""
        for half, size, stairs in zip(("first", "second"), self._halves, self._stairs, strict=True):
            # `_climb` multiplies the two in int32.
            if size * stairs >= 2**31:
                rule = f"below 2**31 / cycle_{half}_step_size={size}"
                name = join(self.path, f"cycle_{half}_stair_count")
                yield wrong_value(name, rule, stairs, "Use fewer stairs, or 0")

    @property
    def _halves(self) -> tuple[int, int]:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size, self.cycle_first_step_size if second is None else second

    @property
    def _stairs(self) -> tuple[int, int]:
        second = self.cycle_second_stair_count
        return (
            self.cycle_first_stair_count,
            self.cycle_first_stair_count if second is None else second,
        )

    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate after `count` updates."""
        iteration = iteration_of(count, self.last_batch_iteration)
        cycling = self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self._height(
            iteration
        )
        decaying = self.cycle_min_lr / (1 + self.decay_lr_rate * self._decay_steps(iteration))
        return jnp.where(iteration < sum(self._halves), cycling, decaying)

    def momentum(self, count: ArrayLike) -> jax.Array:
        """The momentum, even if `cycle_momentum` is false.

        Args:
            count: Number of updates so far, 0 for the first update.

        Returns:
            A float32 scalar.
        """
        iteration = iteration_of(count, self.last_batch_iteration)
        cycling = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._height(
            iteration
        )
        growing = self.cycle_max_mom * (1 + self.decay_mom_rate * self._decay_steps(iteration))
        momentum = jnp.where(iteration < sum(self._halves), cycling, growing)
        # The update before iteration 0 has the value that DeepSpeed writes into the optimiser when
        # it makes the schedule.
        return jnp.where(iteration < 0, jnp.float32(self.cycle_min_mom), momentum)

    def _height(self, iteration: jax.Array) -> jax.Array:
        """Position in the cycle: 0 at the lowest rate, 1 at the highest."""
        total = sum(self._halves)
        # DeepSpeed's `batch_iteration`, which is its `last_batch_iteration` plus one.
        place = (iteration + 1) % total
        up = _climb(place, self._halves[0], self._stairs[0])
        down = _climb(total - place, self._halves[1], self._stairs[1])
        return jnp.where(place <= self._halves[0], up, down)

    def _decay_steps(self, iteration: jax.Array) -> jax.Array:
        """Number of decay steps so far; 0 during the cycle."""
        gone = jnp.maximum(iteration - sum(self._halves) + 1, 0).astype(jnp.float32)
        return gone / self.decay_step_size if self.decay_step_size else jnp.zeros_like(gone)


def _climb(place: jax.Array, size: int, stairs: int) -> jax.Array:
    """Share of one half of the cycle that is complete, rounded down to stairs if there are any."""
    if size and stairs:
        return (place * stairs // size).astype(jnp.float32) / stairs
    # A half of length 0 is never entered, but `jnp.where` computes both sides.
    return place.astype(jnp.float32) / max(size, 1)
