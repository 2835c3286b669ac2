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
        iteration: Updates tried so far, including skipped ones. int32.
        last_overflow: The iteration of the last overflow, -1 before the first. int32.
        hysteresis: The number of overflows until the scale is lowered, including the one that
            lowers it. int32.
        exhausted: Whether a gradient overflowed at the smallest scale. bool.
    """

    scale: jax.Array
    iteration: jax.Array
    last_overflow: jax.Array
    hysteresis: jax.Array
    exhausted: jax.Array


@dataclass(frozen=True)
class LossScaler:
    """The rule that changes the loss scale from update to update.

    An overflow halves a dynamic scale, and every `window` updates without an overflow double it.
    The first overflows only use up the hysteresis: with `hysteresis=2` the second overflow halves
    the scale. The hysteresis is restored when the scale grows, or with `consecutive_hysteresis` by
    every update without an overflow. The scale of every update equals that of DeepSpeed's scaler
    under ZeRO. DeepSpeed's scaler without ZeRO ignores the hysteresis.

    DeepSpeed raises an exception if an overflow occurs at the smallest scale. Compiled code cannot
    raise, so this class keeps the scale and sets the state's `exhausted` permanently. The caller
    must check `exhausted`.

    Args:
        initial_scale: The scale to start from; a static scaler keeps it.
        dynamic: Whether the scale changes.
        window: Number of updates without an overflow after which the scale doubles.
        hysteresis: Number of overflows after which the scale halves.
        consecutive_hysteresis: Whether these overflows must be consecutive, without a good update
            in between.
        min_scale: The smallest scale.
        enabled: If False, there is nothing to scale, and `update` does nothing.

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
        """The scaler for float32 and bfloat16, which does not scale the loss.

        Returns:
            The scaler.
        """
        return cls(enabled=False)

    @classmethod
    def from_section(cls, fp16: Any) -> Self:
        """The scaler that the configuration's `fp16` describes.

        Args:
            fp16: Any object with the attributes `enabled`, `loss_scale` (0 means dynamic),
                `initial_scale_power`, `loss_scale_window`, `hysteresis`, `consecutive_hysteresis`
                and `min_loss_scale`.

        Returns:
            The scaler; `none()` if `enabled` is false.

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
            config: The configuration, of which the section `fp16` is used.

        Returns:
            The scaler; None without `fp16`.

        Raises:
            ConfigError: The initial loss scale is not valid.
        """
        return cls.from_section(config.fp16) if config.fp16.enabled else None

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
            state: The state before the update.
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
        # DeepSpeed's count, which excludes the current update: the scale first grows at update
        # `window + 1`.
        good = state.iteration - state.last_overflow - 1
        higher = ~overflow & (good > 0) & (good % self.window == 0)
        restored = ~overflow if self.consecutive_hysteresis else higher
        lowered = jnp.maximum(state.scale / _FACTOR, self.min_scale)
        scale = jnp.where(lower, lowered, jnp.where(higher, state.scale * _FACTOR, state.scale))
        # Once the hysteresis is 1, it does not change until it is restored: every further overflow
        # lowers the scale.
        left = jnp.where(overflow & ~spent, state.hysteresis - 1, state.hysteresis)
        return LossScaleState(
            scale=scale,
            iteration=counted.iteration,
            last_overflow=counted.last_overflow,
            hysteresis=jnp.where(restored, self.hysteresis, left),
            exhausted=state.exhausted | stuck,
        )
