"""Optimisers by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.numbers import as_number
from jaxpipe.config import read_whole
from jaxpipe.errors import ConfigError, shown

from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._check import unknown_name
from ._for_model import Matrices, MatrixOptimizer
from ._lamb import Lamb
from ._lion import Lion
from ._muon import Muon
from ._one_cycle import OneCycle
from ._optax import REJECTIONS, check_arguments, optax_optimizers, rejected
from ._recipe import SECTION, Hyperparams, OptimizerParams, warn_of_tuning
from ._sgd import SGD
from ._warmup_cosine_lr import WarmupCosineLR
from ._warmup_lr import WarmupLR

_RATE = "learning_rate"
_ADAM_RATE = "adam_learning_rate"


def deepspeed_optimizers() -> dict[str, type[OptimizerParams]]:
    """The supported DeepSpeed optimisers, by name."""
    return {cls.__name__: cls for cls in (Adam, AdamW, Lamb, Adagrad, Lion, SGD, Muon)}


def make_optimizer(
    name: str,
    params: Mapping[str, Any] | None = None,
    schedule: optax.Schedule | None = None,
    matrices: Matrices = None,
) -> optax.GradientTransformation:
    """Make the optimiser that the configuration's `optimizer` describes.

    DeepSpeed's own names are matched in any case. They accept DeepSpeed's parameters and defaults
    and behave as in DeepSpeed: `"Adam"` is AdamW unless `adam_w_mode` is false. Any other name is a
    function of optax or `optax.contrib`, and the parameters are its arguments. Learning rate,
    momenta and weight decay are stored in the optimiser's state by `optax.inject_hyperparams`.

    Args:
        name: `optimizer.type`.
        params: `optimizer.params`.
        schedule: The learning rate, which replaces the one in `params`. `OneCycle` cycles the
            momentum too, as it describes.
        matrices: For `"Muon"`, a function of a tree of parameters to a tree of booleans: whether to
            orthogonalise each. None: a pipeline recognises the hidden matrices of its model.
            Anywhere else, as in `optax.chain`, they are all parameters of two dims.

    Returns:
        The transformation.

    Raises:
        ConfigError: The name or a parameter is unknown or refused, or a parameter is missing, of
            the wrong type or out of range.

    Warns:
        UserWarning: A parameter tunes PyTorch and has no effect.

    Example:
        >>> optimizer = make_optimizer("Adam", {"lr": 0.25, "betas": [0.5, 0.75]})
        >>> sorted(optimizer.init({"w": jnp.ones(2)}).hyperparams)
        ['b1', 'b2', 'learning_rate', 'weight_decay']
    """
    params = {} if params is None else params
    cls = _find(name)
    if cls is None:
        return _make_optax_optimizer(name, params, schedule)
    if matrices is not None and not cls.by_matrix:
        raise ConfigError(
            f"matrices must be left out for an optimizer that treats all parameters alike, but got "
            f"optimizer.type={name!r}. Remove the argument, or use Muon."
        )
    values = read_whole(cls, params)
    warn_of_tuning(cls, params)

    def make(matrices: Matrices) -> optax.GradientTransformation:
        factory, hyperparams = values.build(matrices)
        hyperparams |= _followed(cls, params, hyperparams, schedule)
        # Otherwise optax gives them a dtype that depends on the parameters in the tree. It may
        # round a rate, as bfloat16 would, and may differ on a device with other parameters.
        return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(**hyperparams)

    return MatrixOptimizer(make) if matrices is None and cls.by_matrix else make(matrices)


def hyperparam_schedules(
    name: str, params: Mapping[str, Any] | None, schedule: optax.Schedule | None
) -> dict[str, optax.Schedule]:
    """The hyperparameters that follow a schedule in the optimiser of `make_optimizer`, by name."""
    params = {} if params is None else params
    cls = _find(name)
    if cls is None:
        return factory_schedules(functools.partial(_optax_factory(name), **params), schedule)
    hyperparams = read_whole(cls, params).build()[1]
    followed = _followed(cls, params, hyperparams, schedule)
    return {key: cast(optax.Schedule, value) for key, value in followed.items() if callable(value)}


def optimizer_lr(name: str, params: Mapping[str, Any] | None = None) -> float | None:
    """The learning rate that the configuration's `optimizer` itself sets; for Muon, of matrices.

    None for an optax optimiser without a learning rate, or with a schedule.
    """
    params = {} if params is None else params
    cls = _find(name)
    if cls is not None:
        return read_whole(cls, params).build()[1][_RATE]
    default = inspect.signature(_optax_factory(name)).parameters[_RATE].default
    rate = params.get(_RATE, default)
    return as_number(rate)


def with_schedule(
    factory: Callable[..., optax.GradientTransformation], schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Give an optimiser a learning-rate schedule that can be read from its state.

    `OneCycle` cycles the factory's `b1` or `momentum` too.

    Example:
        >>> optimizer = with_schedule(optax.sgd, lambda count: 0.5**count)
        >>> float(optimizer.init({"w": jnp.ones(2)}).hyperparams["learning_rate"])
        1.0
    """
    followed = factory_schedules(factory, schedule)
    return _inject(factory, {_RATE: schedule, **followed})


def factory_schedules(
    factory: Callable[..., optax.GradientTransformation], schedule: optax.Schedule | None
) -> dict[str, optax.Schedule]:
    """The hyperparameters that follow a schedule in the optimiser of `with_schedule`, by name."""
    momentum = _momentum_of(_parameters(factory))
    if schedule is None:
        return {}
    if momentum and isinstance(schedule, OneCycle) and schedule.cycle_momentum:
        return {_RATE: schedule, momentum: schedule.momentum}
    return {_RATE: schedule}


def _find(name: str) -> type[OptimizerParams] | None:
    """The parameters of a DeepSpeed name; None for an optax name."""
    ours = deepspeed_optimizers()
    path = "optimizer.type"
    lowered = {other.lower(): cls for other, cls in ours.items()}
    if isinstance(name, str) and name.lower() in lowered:
        return lowered[name.lower()]
    theirs = optax_optimizers()
    if name not in theirs:
        raise unknown_name(
            path, name, [*ours, *(other for other in theirs if other not in lowered)]
        )
    return None


def _followed(
    cls: type[OptimizerParams],
    params: Mapping[str, Any],
    hyperparams: Hyperparams,
    schedule: optax.Schedule | None,
) -> Hyperparams:
    """The hyperparameters that a schedule decides, each with its own schedule."""
    if schedule is None:
        return {}
    followed: Hyperparams = {_RATE: schedule}
    if _ADAM_RATE in hyperparams:
        # These are relative to the optimiser's own rate, of which Muon has two. Other schedules set
        # one rate for both groups.
        relative = isinstance(schedule, WarmupLR | WarmupCosineLR)
        followed[_ADAM_RATE] = (
            replace(schedule, lr=hyperparams[_ADAM_RATE]) if relative else schedule
        )
    if isinstance(schedule, OneCycle) and schedule.cycle_momentum and cls.cycled in hyperparams:
        followed[cls.cycled] = schedule.momentum
        if cls.cycled == "b1" and "betas" not in params:
            followed["b2"] = schedule.cycled_b2
    return followed


def _optax_factory(name: str) -> Callable[..., optax.GradientTransformation]:
    return optax_optimizers()[name]


def _make_optax_optimizer(
    name: str, params: Mapping[str, Any], schedule: optax.Schedule | None
) -> optax.GradientTransformation:
    factory = _optax_factory(name)
    arguments = dict(params)
    check_arguments(
        SECTION, name, factory, arguments if schedule is None else {**arguments, _RATE: schedule}
    )
    try:
        arguments |= factory_schedules(functools.partial(factory, **arguments), schedule)
        optimizer = _inject(factory, arguments)
        # Schedules and masks can only come from Python. They may be made for the model's tree and
        # fail on this one.
        if not any(callable(value) or isinstance(value, Mapping) for value in params.values()):
            _try_out(optimizer)
    except REJECTIONS as error:
        raise rejected(SECTION, name, params, error) from error
    return optimizer


def _try_out(optimizer: optax.GradientTransformation) -> None:
    """Trace an update of a matrix."""
    # With the arguments that the engine passes: without the loss or other extra arguments.
    tree = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    state = jax.eval_shape(optimizer.init, tree)
    jax.eval_shape(optimizer.update, tree, state, tree)


def _inject(
    factory: Callable[..., optax.GradientTransformation], arguments: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Call a factory so that its learning rate and its momentum are stored in the state."""
    parameters = _parameters(factory)
    # By default, optax would store every number in the state, and numbers that Python code compares
    # would become tracers.
    free = {_RATE, _momentum_of(parameters)}
    static = [name for name in parameters if name not in free]
    return optax.inject_hyperparams(factory, static, jnp.float32)(**arguments)


def _parameters(
    factory: Callable[..., optax.GradientTransformation],
) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}
    if _RATE not in parameters:
        raise ConfigError(
            "An optimizer with a schedule must be made by a function of learning_rate, but got "
            f"optimizer={shown(factory)}. Pass for instance optax.adamw, or "
            "functools.partial(optax.sgd, momentum=0.9)."
        )
    return parameters


def _momentum_of(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The argument name of a factory's momentum: `b1`, or a `momentum` that is not 0."""
    for name in ("b1", "momentum"):
        default = parameters[name].default if name in parameters else None
        if isinstance(default, int | float) and not isinstance(default, bool) and default:
            return name
    return None
