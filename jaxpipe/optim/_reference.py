"""The configuration reference's texts about optimisers and learning-rate schedules."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from jaxpipe.config import Section, key_names

from ._optimizers import deepspeed_optimizers
from ._schedules import deepspeed_schedules


def optim_values() -> dict[str, str]:
    """DeepSpeed's names and their parameters, by the path of the key that accepts them."""
    # Optax's names are only mentioned, because they change from release to release.
    optimizers = {name: _defaults(cls) for name, cls in deepspeed_optimizers().items()}
    schedules = {name: _defaults(cls) for name, cls in deepspeed_schedules().items()}
    return {
        "optimizer.type": f"{_names(optimizers)}, or one of optax or optax.contrib that takes "
        "learning_rate, such as 'adafactor'",
        "optimizer.params": f"{_params(optimizers)}; or what optax's function takes",
        "scheduler.type": f"{_names(schedules)}, or one of optax, such as 'cosine_decay_schedule'",
        "scheduler.params": f"{_params(schedules)}; or what optax's function takes",
    }


def _defaults(cls: type[Section]) -> dict[str, Any]:
    defaults = {item.name: item.default for item in fields(cls)}
    return {name: defaults[name] for name in key_names(cls)}


def _names(found: Iterable[str]) -> str:
    return ", ".join(map(repr, found))


def _params(found: Mapping[str, Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{name}: {', '.join(_param(*param) for param in params.items())}"
        for name, params in found.items()
    )


def _param(name: str, default: Any) -> str:
    return f"{name} (required)" if default is MISSING else f"{name}={json.dumps(default)}"
