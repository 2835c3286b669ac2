"""Descriptions of the optimisers in the configuration, and reading of their parameters."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import optax

from jaxpipe._numbers import plain
from jaxpipe.config import Collector, Reader, wrong_value

from ._check import unknown_param

SECTION = "optimizer.params"

Factory: TypeAlias = Callable[..., optax.GradientTransformation]
"""A constructor whose arguments are all hyperparameters that may change during a run."""

Hyperparams: TypeAlias = dict[str, Any]
"""Hyperparameters by name: numbers, or schedules."""


@dataclass(frozen=True)
class Recipe:
    """An optimiser, described by its JSON parameters.

    `params` has the default and reader of each parameter that has an effect. `build` makes a
    factory, and the hyperparameters to call it with, from the parameters that were read. `refused`
    has the reason and repair for each unsupported DeepSpeed parameter. `cycled` is the
    hyperparameter that `OneCycle` cycles against the learning rate. With `by_matrix`, `build` also
    needs `"matrices"`, see `make_optimizer`.
    """

    params: Mapping[str, tuple[Any, Reader]]
    build: Callable[[Mapping[str, Any]], tuple[Factory, Hyperparams]]
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    cycled: str | None = None
    by_matrix: bool = False


def tuning_params() -> frozenset[str]:
    """Names of parameters that tune PyTorch's kernels and change no result."""
    return frozenset({"capturable", "differentiable", "foreach", "fused", "set_grad_none"})


def read_params(recipe: Recipe, params: Mapping[str, Any]) -> dict[str, Any]:
    """Read the parameters of one optimiser.

    Args:
        recipe: The optimiser.
        params: `optimizer.params`.

    Returns:
        All its parameters, with defaults filled in.

    Raises:
        ConfigError: Parameters are unknown or refused, of the wrong type or out of range. The
            message lists all of them.
    """
    errors = Collector()
    values = {name: default for name, (default, _) in recipe.params.items()}
    for name, given in params.items():
        path = f"{SECTION}.{name}"
        value = plain(given)
        with errors.catch():
            if name in recipe.refused:
                reason, repair = recipe.refused[name]
                raise wrong_value(path, f"left out, because {reason}", value, repair)
            if name in tuning_params():
                if value not in (None, True, False):
                    raise wrong_value(
                        path, "true, false or null", value, "Remove the key: it has no effect here"
                    )
            elif name in recipe.params:
                values[name] = recipe.params[name][1](value, path)
            else:
                raise unknown_param(SECTION, name, recipe.params)
    errors.raise_all()
    return values


def warn_of_tuning(params: Mapping[str, Any]) -> None:
    """Warn of all `optimizer.params` that are set but have no effect."""
    idle = sorted(name for name in tuning_params() if params.get(name))
    if idle:
        names = ", ".join(f"{SECTION}.{name}" for name in idle)
        warnings.warn(
            f"{names} tunes PyTorch and has no effect here. Remove it.", UserWarning, stacklevel=3
        )


def clipping_refused() -> dict[str, tuple[str, str]]:
    """The entry of `refused` that all of DeepSpeed's optimisers share."""
    reason = "an optimizer sees the gradients of one stage only"
    return {"max_grad_norm": (reason, "Use gradient_clipping, at the top of the configuration")}
