"""Base of DeepSpeed's learning-rate schedules."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpipe.config import Collector, Reader

from ._check import missing_param, unknown_param

SECTION = "scheduler.params"


@dataclass(frozen=True)
class LRSchedule(ABC):
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

    def __post_init__(self) -> None:
        for item in fields(self):
            value = item.metadata["reader"](getattr(self, item.name), f"{SECTION}.{item.name}")
            object.__setattr__(self, item.name, value)

    @abstractmethod
    def __call__(self, count: ArrayLike) -> jax.Array:
        """The learning rate.

        Args:
            count: Number of updates so far, 0 for the first update.

        Returns:
            A float32 scalar.
        """

    @classmethod
    def from_params(cls, params: Mapping[str, Any], **extra: Any) -> Self:
        """Make the schedule from the `params` of the configuration's `scheduler`.

        Args:
            params: The parameters.
            extra: Fields that are not JSON parameters.

        Returns:
            The schedule.

        Raises:
            ConfigError: Parameters are unknown, missing, of the wrong type or out of range. The
                message lists all of them.
        """
        known = {item.name: item for item in fields(cls) if not item.metadata["hidden"]}
        # The constructor reads the parameters again but stops at the first error. Reading them here
        # reports all errors.
        errors = Collector()
        values = dict(extra)
        for name, value in params.items():
            with errors.catch():
                if name not in known:
                    raise unknown_param(SECTION, name, known)
                values[name] = known[name].metadata["reader"](value, f"{SECTION}.{name}")
        missing = [
            name for name, item in known.items() if item.default is MISSING and name not in values
        ]
        errors.add(missing_param(SECTION, name, cls.__name__) for name in missing)
        if not missing:
            with errors.catch(compares=True):
                cls(**values)
        errors.raise_all()
        return cls(**values)


def param(default: Any, reader: Reader, *, hidden: bool = False) -> Any:
    """Declare a parameter of a schedule; a `hidden` one is not part of the configuration.

    `reader` checks and converts its value.
    """
    return field(default=default, metadata={"reader": reader, "hidden": hidden})


def required(reader: Reader) -> Any:
    """Declare a parameter of a schedule that has no default.

    `reader` checks and converts its value.
    """
    return field(metadata={"reader": reader, "hidden": False})


def iteration_of(count: ArrayLike, last_batch_iteration: int) -> jax.Array:
    """DeepSpeed's `last_batch_iteration` during an update, an int32 scalar.

    `count` is the number of updates so far, and `last_batch_iteration` the value before the first.
    """
    return jnp.asarray(count, jnp.int32) + last_batch_iteration
