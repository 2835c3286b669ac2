"""Optax's optimisers and schedules by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxpipe.config import Collector, checked_key, missing_key, unknown_key
from jaxpipe.errors import ConfigError, nearest, shown

REJECTIONS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    NotImplementedError,
)
"""Exceptions that optax and JAX raise for arguments they cannot use."""


def optax_schedules() -> dict[str, Callable[..., Any]]:
    """Optax's schedules with numeric arguments, by name."""
    found = {
        name: getattr(optax.schedules, name)
        for name in dir(optax.schedules)
        if not name.startswith("_")
    }
    return {
        name: function
        for name, function in found.items()
        if inspect.isfunction(function)
        and (name.endswith("_schedule") or name == "exponential_decay")
    }


def optax_optimizers() -> dict[str, Callable[..., Any]]:
    """Optimisers of optax and `optax.contrib` that take a learning rate, by name."""
    found = {}
    # Optax itself comes last, so that its own function wins if both have the name.
    for module in (optax.contrib, optax):
        for name in dir(module):
            function = getattr(module, name)
            is_function = inspect.isfunction(function) or isinstance(function, functools.partial)
            if name.startswith(("_", "scale_by")) or not is_function:
                continue
            if "learning_rate" in inspect.signature(function).parameters:
                found[name] = function
    return found


def check_arguments(
    section: str, name: str, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Refuse unknown arguments of a function, and missing ones, in one error."""
    parameters = inspect.signature(function).parameters
    errors = Collector()
    for argument in arguments:
        with errors.catch():
            if checked_key(argument, section) not in parameters:
                near = nearest(argument, parameters, cutoff=0.5)
                raise unknown_key(section, argument, near, parameters)
    errors.add(
        missing_key(section, parameter.name, arguments)
        for parameter in parameters.values()
        if parameter.default is inspect.Parameter.empty and parameter.name not in arguments
    )
    errors.raise_all()


def rejected(
    section: str, name: str, arguments: Mapping[str, Any], error: Exception
) -> ConfigError:
    """Error for arguments whose names are right but whose values optax cannot use."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{section} must be arguments that optax's {name} accepts, but got "
        f"{section}={shown(dict(arguments))}, which fails with: {first} Correct the values as the "
        f"documentation of optax's {name} asks.",
        paths=[section],
    )
