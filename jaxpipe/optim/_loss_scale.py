"""The factor that keeps float16 gradients in range."""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config import TrainConfig, number, read_flag, wrong_value
from jaxpipe.errors import ConfigError

from ._check import integer

_FACTOR = 2.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScaleState:
    """State of a `LossScaler`, as scalars.

    Attributes:
        scale: The loss is multiplied by this, and gradients are divided by it. float32.
        iteration: Updates tried so far, skipped ones among them. int32.
        last_overflow: The iteration of the last overflow, -1 before the first. int32.
        hysteresis: Overflows from here on, this one among them, until the scale is lowered. int32.
        exhausted: Whether a gradient overflowed at the smallest scale. bool.
    """

    scale: jax.Array
    iteration: jax.Array
    last_overflow: jax.Array
    hysteresis: jax.Array
    exhausted: jax.Array


@dataclass(frozen=True)
class LossScaler:
    """Rule by which the loss scale moves from update to update.

    A dynamic scale is halved by an overflow and doubled after every `window` updates without one.
    The first overflows only use up the hysteresis: with `hysteresis=2` it is the second that halves
    the scale. The hysteresis is restored when the scale grows, or with `consecutive_hysteresis` by
    every update without an overflow. Update by update this is DeepSpeed's scaler under ZeRO, which
    its scaler without ZeRO differs from by ignoring the hysteresis.

    An overflow at the smallest scale, which stops DeepSpeed with an exception, sets the state's
    `exhausted` for good, and the scale stays: compiled code cannot raise, so whoever runs it must
    look at `exhausted`.

    Args:
        initial_scale: The scale to start from; a static scaler keeps it.
        dynamic: Whether it moves.
        window: Updates without an overflow that double it.
        hysteresis: Overflows that halve it.
        consecutive_hysteresis: Whether these must follow each other without a good update between.
        min_scale: The smallest scale.
        enabled: False: there is nothing to scale, and `update` does nothing.

    Raises:
        ConfigError: A value is of the wrong type or out of range.

    Example:
        >>> scaler = LossScaler(4.0, dynamic=True, hysteresis=1)
        >>> float(scaler.update(scaler.init(), jnp.array(True)).scale)
        2.0
    """

    initial_scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    enabled: bool = True

    def __post_init__(self) -> None:
        key = "fp16.initial_scale_power" if self.dynamic else "fp16.loss_scale"
        scale = number(0.0)(self.initial_scale, key)
        if scale <= 0 or scale > float(np.finfo(np.float32).max):
            raise wrong_value(
                key,
                "a scale above 0 within float32",
                self.initial_scale,
                "Use a scale such as 65536",
            )
        read_flag(self.consecutive_hysteresis, "fp16.consecutive_hysteresis")
        if not self.dynamic:
            return
        integer(1)(self.window, "fp16.loss_scale_window")
        integer(1)(self.hysteresis, "fp16.hysteresis")
        smallest = number(0.0)(self.min_scale, "fp16.min_loss_scale")
        if not 0 < smallest <= scale:
            path = "fp16.min_loss_scale"
            raise ConfigError(
                f"{path} must be above 0 and at most the initial scale of {scale:g}, but got "
                f"{path}={smallest:g}. Lower it, or raise fp16.initial_scale_power.",
                paths=[path, "fp16.initial_scale_power"],
            )

    @classmethod
    def none(cls) -> Self:
        """The scaler of float32 and bfloat16, which leaves the loss alone.

        Returns:
            The scaler.
        """
        return cls(enabled=False)

    @classmethod
    def from_section(cls, fp16: Any) -> Self:
        """The scaler that the configuration's `fp16` describes.

        Args:
            fp16: Anything with the attributes `enabled`, `loss_scale` (0: dynamic),
                `initial_scale_power`, `loss_scale_window`, `hysteresis`, `consecutive_hysteresis`
                and `min_loss_scale`.

        Returns:
            The scaler; `none()` where `enabled` is false.

        Raises:
            ConfigError: A value is of the wrong type or out of range.
        """
        if not fp16.enabled:
            return cls.none()
        if number(0.0)(fp16.loss_scale, "fp16.loss_scale"):
            return cls(float(fp16.loss_scale))
        path = "fp16.initial_scale_power"
        power = integer(0)(fp16.initial_scale_power, path)
        if power > 127:
            raise wrong_value(path, "an integer of at most 127", power, "Use for instance 16")
        return cls(
            2.0**power,
            dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_scale=fp16.min_loss_scale,
        )

    @classmethod
    def from_config(cls, config: TrainConfig) -> Self | None:
        """The scaler of a configuration.

        Args:
            config: Its sections `fp16` and `bf16`.

        Returns:
            The scaler; None where updates are not looked at for overflows either.

        Raises:
            ConfigError: The loss scale cannot start where it is to.
        """
        if config.fp16.enabled:
            return cls.from_section(config.fp16)
        return cls.none() if config.bf16.enabled and config.bf16.check_grad_overflow else None

    def init(self) -> LossScaleState:
        """The state before the first update.

        Returns:
            The state.
        """
        return LossScaleState(
            scale=jnp.float32(self.initial_scale),
            iteration=jnp.int32(0),
            last_overflow=jnp.int32(-1),
            hysteresis=jnp.int32(self.hysteresis),
            exhausted=jnp.bool_(False),
        )

    def update(self, state: LossScaleState, overflow: jax.Array) -> LossScaleState:
        """The state after an update.

        Args:
            state: The state before it.
            overflow: Whether a gradient was not finite, so that the update was skipped. bool
                scalar.

        Returns:
            The state for the next update.
        """
        if not self.enabled:
            return state
        overflow = jnp.asarray(overflow, jnp.bool_)
        counted = LossScaleState(
            scale=state.scale,
            iteration=state.iteration + 1,
            last_overflow=jnp.where(overflow, state.iteration, state.last_overflow),
            hysteresis=state.hysteresis,
            exhausted=state.exhausted,
        )
        return self._moved(state, counted, overflow) if self.dynamic else counted

    def _moved(
        self, state: LossScaleState, counted: LossScaleState, overflow: jax.Array
    ) -> LossScaleState:
        spent = state.hysteresis <= 1
        lower = overflow & spent
        # Compared before it is lowered: reaching the smallest scale is allowed, overflowing there
        # is not.
        stuck = lower & (state.scale == self.min_scale)
        # DeepSpeed's count, which leaves the present update out: the scale first grows at update
        # `window + 1`.
        good = state.iteration - state.last_overflow - 1
        higher = ~overflow & (good > 0) & (good % self.window == 0)
        restored = ~overflow if self.consecutive_hysteresis else higher
        lowered = jnp.maximum(state.scale / _FACTOR, self.min_scale)
        scale = jnp.where(lower, lowered, jnp.where(higher, state.scale * _FACTOR, state.scale))
        # Once it is down to 1 it stays there: until it is restored, every further overflow lowers
        # the scale.
        left = jnp.where(overflow & ~spent, state.hysteresis - 1, state.hysteresis)
        return LossScaleState(
            scale=scale,
            iteration=counted.iteration,
            last_overflow=counted.last_overflow,
            hysteresis=jnp.where(restored, self.hysteresis, left),
            exhausted=state.exhausted | stuck,
        )
