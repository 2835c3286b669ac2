"""Learning-rate schedules by name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jaxpipe.config import read_whole
from jaxpipe.errors import ConfigError

from ._base import SECTION, LRSchedule
from ._check import unknown_name
from ._lr_range_test import LRRangeTest
from ._one_cycle import OneCycle
from ._optax import REJECTIONS, check_arguments, optax_schedules, rejected
from ._warmup_cosine_lr import WarmupCosineLR
from ._warmup_decay_lr import WarmupDecayLR
from ._warmup_lr import WarmupLR

_PIECEWISE = "boundaries_and_scales"


def deepspeed_schedules() -> dict[str, type[LRSchedule]]:
    """DeepSpeed's schedules, by name."""
    return {
        cls.__name__: cls
        for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
    }


def make_schedule(
    name: str, params: Mapping[str, Any] | None = None, base_lr: float | None = None
) -> LRSchedule | optax.Schedule:
    """Make the schedule that the configuration's `scheduler` describes.

    Args:
        name: `scheduler.type`: one of DeepSpeed's five, or a schedule of optax such as
            `cosine_decay_schedule`.
        params: `scheduler.params`; for optax, the function's arguments by name.
        base_lr: The optimiser's own rate, as `optimizer_lr` returns it. `WarmupCosineLR` is a ratio
            of it, and `WarmupLR` rises to it by default.

    Returns:
        A function of the number of updates so far that returns a float32 rate.

    Raises:
        ConfigError: The name or a parameter is unknown, or a parameter is missing, of the wrong
            type or out of range.

    Example:
        >>> params = {"warmup_num_steps": 4, "warmup_type": "linear"}
        >>> schedule = make_schedule("WarmupLR", params, base_lr=0.4)
        >>> [round(float(schedule(count)), 3) for count in range(6)]
        [0.0, 0.0, 0.1, 0.2, 0.3, 0.4]
    """
    ours = deepspeed_schedules()
    theirs = optax_schedules()
    params = {} if params is None else params
    if name in ours:
        relative = name in ("WarmupLR", "WarmupCosineLR") and base_lr is not None
        return read_whole(ours[name], params, {"lr": base_lr} if relative else {})
    if name not in theirs:
        raise unknown_name("scheduler.type", name, [*ours, *theirs])
    return _make_optax_schedule(name, theirs[name], params)


def _make_optax_schedule(
    name: str, function: Callable[..., Any], params: Mapping[str, Any]
) -> optax.Schedule:
    check_arguments(SECTION, name, function, params)
    arguments = dict(params)
    try:
        if isinstance(arguments.get(_PIECEWISE), Mapping):
            # JSON keys are always strings.
            arguments[_PIECEWISE] = {
                int(step): scale for step, scale in arguments[_PIECEWISE].items()
            }
        schedule = function(**arguments)

        def learning_rate(count: ArrayLike) -> jax.Array:
            return jnp.asarray(schedule(count), jnp.float32)

        shape = jax.eval_shape(learning_rate, jax.ShapeDtypeStruct((), jnp.int32)).shape
    except REJECTIONS as error:
        raise rejected(SECTION, name, params, error) from error
    if shape != ():
        raise ConfigError(
            f"{SECTION} must give one rate per update, but got rates of shape={shape} from {name}. "
            "Use numbers, not lists, for the rates.",
            paths=[SECTION],
        )
    return learning_rate
