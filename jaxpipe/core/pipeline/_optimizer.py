"""Chooses a run's optimiser and learning rate schedule, from arguments or the configuration."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.numbers import as_number
from jaxpipe.config import Collector, OptimizerSection, TrainConfig
from jaxpipe.errors import ConfigError, shown
from jaxpipe.layers import ModelTrace
from jaxpipe.optim import (
    factory_schedules,
    for_model,
    hyperparam_schedules,
    make_optimizer,
    make_schedule,
    optimizer_lr,
    with_average,
    with_schedule,
)

_CONSTRUCTOR = (
    "Pass the constructor, such as optimizer=optax.adamw or functools.partial(optax.sgd, "
    "momentum=0.9)"
)


@dataclass(frozen=True)
class ChosenOptimizer:
    """The optimiser of a run, with its schedules."""

    # None: the run only evaluates.
    transformation: optax.GradientTransformation | None
    # That of the learning rate, if it was given separately from the optimiser.
    lr_scheduler: optax.Schedule | None = None
    # Those of hyperparameters in the optimiser state, as `next_hyperparams` takes them.
    schedules: Mapping[str, optax.Schedule] = field(default_factory=dict)


def choose_optimizer(
    config: TrainConfig,
    optimizer: optax.GradientTransformation
    | Callable[..., optax.GradientTransformation]
    | None = None,
    lr_scheduler: optax.Schedule | None = None,
) -> ChosenOptimizer:
    """Determine the optimiser and the schedule of a run, and combine them.

    For use with a schedule, `optimizer` is a constructor that takes `learning_rate`.
    """
    named = config.optimizer
    section = config.scheduler
    is_constructor = callable(optimizer)
    errors = Collector()
    if optimizer is not None and named is not None:
        errors.add([_given_twice("optimizer", optimizer, named.type)])
    if lr_scheduler is not None and section is not None:
        errors.add([_given_twice("lr_scheduler", lr_scheduler, section.type, key="scheduler")])
    if lr_scheduler is not None:
        with errors.catch():
            _check_schedule(lr_scheduler)
    rate: float | None = (
        0.0  # placeholder for the rate of a wrong optimizer, so that the schedule is still checked
    )
    with errors.catch():
        if named is not None:
            rate = optimizer_lr(named.type, named.params)
        elif is_constructor:
            rate = _default_rate(optimizer)
    schedule = lr_scheduler
    if section is not None:
        schedule = optax.constant_schedule(0.0)  # a placeholder too
        with errors.catch():
            schedule = make_schedule(section.type, section.params, rate)
    chosen = ChosenOptimizer(None)
    with errors.catch(compares=True):
        if named is not None:
            chosen = _named_optimizer(named, schedule)
        elif is_constructor:
            chosen = _constructed(optimizer, schedule)
        else:
            _check_finished(config, optimizer, lr_scheduler)
            chosen = ChosenOptimizer(optimizer)
    errors.raise_all()
    if config.ema is not None and chosen.transformation is None:
        raise ConfigError(
            "an average must have an optimizer whose updates it follows, but got "
            f"ema.decay={config.ema.decay} and optimizer=None. Remove the section ema; the average "
            "of a checkpoint is read by jaxpipe.checkpoint.load_params(path, params='ema').",
            paths=["ema", "optimizer"],
        )
    return chosen


def optimizer_for(
    optimizer: optax.GradientTransformation, trace: ModelTrace, config: TrainConfig
) -> optax.GradientTransformation:
    """Make a run's optimiser for its model, with the average of the section `ema` in its state."""
    rate = config.pipeline.router_bias_update_rate
    if rate and not trace.load_biases - trace.frozen:
        raise ConfigError(
            "router_bias_update_rate must be 0 for a model that trains no parameter marked by "
            f"load_bias, but got pipeline.router_bias_update_rate={rate}. Remove it, or set the "
            "mark where a layer makes the parameter; ExpertsConfig has a switch for routers.",
            paths=["pipeline.router_bias_update_rate"],
        )
    optimizer = for_model(optimizer, trace, rate)
    if config.ema is None:
        return optimizer
    return with_average(optimizer, config.ema.decay, warms_up=config.ema.warmup)


def _named_optimizer(section: OptimizerSection, schedule: optax.Schedule | None) -> ChosenOptimizer:
    transformation = make_optimizer(section.type, section.params, schedule)
    return ChosenOptimizer(
        transformation, schedule, hyperparam_schedules(section.type, section.params, schedule)
    )


def _constructed(optimizer: Any, schedule: optax.Schedule | None) -> ChosenOptimizer:
    if schedule is None:
        raise ConfigError(
            "optimizer must be built unless a schedule gives its learning rate, but got "
            f"optimizer={shown(optimizer)} and no schedule. Call it, as in optax.adamw(3e-4), or "
            "pass lr_scheduler, or add the section scheduler.",
            paths=["scheduler"],
        )
    return ChosenOptimizer(
        with_schedule(optimizer, schedule), schedule, factory_schedules(optimizer, schedule)
    )


def _check_finished(config: TrainConfig, optimizer: Any, lr_scheduler: Any) -> None:
    # Not a `GradientTransformation` itself. The next error would suggest building it, but it is
    # already built.
    if isinstance(optimizer, optax.MultiSteps):
        raise ConfigError(
            "optimizer must update the parameters at every step, but got "
            "optimizer=optax.MultiSteps, which accumulates gradients itself. Pass the optimizer "
            "inside it, and set gradient_accumulation_steps in the config.",
            paths=["optimizer"],
        )
    if not (optimizer is None or isinstance(optimizer, optax.GradientTransformation)):
        raise ConfigError(
            "optimizer must be an optax transformation, or a constructor of one with an argument "
            f"learning_rate, but got optimizer={shown(optimizer)}. Pass for example "
            "optax.adamw(3e-4)."
        )
    section = config.scheduler
    if lr_scheduler is None and section is None:
        return
    given = (
        f"scheduler.type={section.type!r}"
        if section is not None
        else f"lr_scheduler={shown(lr_scheduler)}"
    )
    if optimizer is None:
        raise ConfigError(
            f"a learning-rate schedule must have an optimizer to act on, but got {given} and "
            f"optimizer=None. {_CONSTRUCTOR}, or name one in the section optimizer.",
            paths=["scheduler", "optimizer"],
        )
    raise ConfigError(
        "a learning-rate schedule must be given to an optimizer whose learning rate is open, but "
        f"got {given} and optimizer={shown(optimizer)}, which is already built. {_CONSTRUCTOR}.",
        paths=["scheduler"],
    )


def _default_rate(factory: Any) -> float | None:
    """Return a constructor's default learning rate, such as one set by `functools.partial`."""
    try:
        parameter = inspect.signature(factory).parameters.get("learning_rate")
    except (TypeError, ValueError):
        return None
    rate = None if parameter is None else parameter.default
    # It is `Parameter.empty` if there is no default, and may be a schedule. True would count as the
    # integer 1.
    return as_number(rate)


def _check_schedule(schedule: Any) -> None:
    found = "which is not a function"
    if callable(schedule):
        try:
            rate = jax.eval_shape(
                lambda count: jnp.asarray(schedule(count), jnp.float32),
                jax.ShapeDtypeStruct((), jnp.int32),
            )
        except Exception as error:  # noqa: BLE001  # the user's function may raise anything
            found = f"which fails with: {(str(error).splitlines() or [type(error).__name__])[0]}"
        else:
            if rate.shape == ():
                return
            found = f"which returns rates of shape={rate.shape}"
    raise ConfigError(
        "lr_scheduler must be a function of the number of updates that returns one rate, but got "
        f"lr_scheduler={shown(schedule)}, {found}. Pass for example "
        "optax.cosine_decay_schedule(3e-4, 1000) or jaxpipe.optim.WarmupLR(warmup_max_lr=3e-4)."
    )


def _given_twice(name: str, value: Any, named: str, key: str | None = None) -> ConfigError:
    key = key or name
    return ConfigError(
        f"{name} must be given in one place, but got {name}={shown(value)} and "
        f"{key}.type={named!r} in the configuration. Remove one of them.",
        paths=[key],
    )
