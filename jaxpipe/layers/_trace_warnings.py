"""Warnings for models that can be traced but may not be what the user meant."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe._util.warn import warn
from jaxpipe.distributed import log as write_log
from jaxpipe.errors import nearest

from ._build import NamedLayer
from ._model_trace import ModelTrace
from ._precision import is_wider, multiplies_wider
from ._trace_layer import train_flag


def warn_of_rules(names: Mapping[str, str | None], warned: set[str]) -> None:
    """Warn of rules that nothing in a layer uses, once; a constraint in loss_fn may."""
    found = [name for name in names if f"rule {name}" not in warned]
    if found:
        warned.update(f"rule {name}" for name in found)
        listed = [
            f"{name!r} (did you mean {names[name]!r}?)" if names[name] else repr(name)
            for name in found
        ]
        warn(
            f"sharding_rules has rules for {', '.join(listed)}, but no weight and no constraint of "
            "a layer has such a logical name. Correct the name, or leave the rule out.",
        )


def warn_of_side(
    layers: Sequence[NamedLayer], side: Mapping[str, PyTree], warned: set[str]
) -> None:
    """Warn of each side input that no layer receives, once."""
    for name in side:
        if f"side {name}" in warned or any(named.layer.arguments.takes(name) for named in layers):
            continue
        warned.add(f"side {name}")
        meant = nearest(
            name, {each for named in layers for each in named.layer.arguments.names} - set(side)
        )
        warn(
            f"side input {name!r} must be named by the call of a layer, but got none that does, so "
            "that nothing uses it. "
            f"{f'Did you mean {meant!r}? Otherwise leave' if meant else 'Leave'} it out.",
        )


def warn_of_data(paths: Sequence[str], warned: set[str]) -> None:
    """Warn of metadata that names the axis of replicas, once."""
    if paths and "over data" not in warned:
        warned.add("over data")
        warn(
            f"{paths[0]}{f' and {len(paths) - 1} further weights' if len(paths) > 1 else ''} must "
            "be whole on each replica, but got 'data' in the partition metadata, which a pipeline "
            "ignores. To divide weights over replicas, give the topology an axis fsdp and "
            'map the name to it, sharding_rules=(("data", "fsdp"),); '
            'otherwise write sharding_rules=(("data", None),).',
        )


def log_wide(layers: Sequence[NamedLayer], trace: ModelTrace, dtype: Any, warned: set[str]) -> None:
    """Log once which layers multiply in the dtype of their inputs, wider than their parameters'."""

    def is_wide(index: int) -> bool:
        has_params = bool(jax.tree.leaves(trace.params[index]))
        is_given = is_wider(trace.boundaries[index], dtype)
        return has_params and is_given and multiplies_wider(trace.programs[index], dtype)

    found = [named.name for named in layers if is_wide(named.index)]
    if found and "wide" not in warned:
        warned.add("wide")
        write_log(
            logging.WARNING,
            "%s%s computed in the wider dtype of the inputs, not in the parameters' %s. If that is "
            "not meant, name a dtype in the layer, as nn.Dense(8, dtype=jnp.bfloat16) does, or "
            "cast the model's inputs with auto_cast.",
            found[0],
            f" and {len(found) - 1} more are" if found[1:] else " is",
            jnp.dtype(dtype).name,
        )


def warn_of_switches(switches: Mapping[str, Mapping[str, bool]], warned: set[str]) -> None:
    """Warn of the switches of each layer, once."""
    found = {layer: names for layer, names in switches.items() if names and layer not in warned}
    if found:
        warned.update(found)
        calls = {
            train_flag(name, value): None
            for names in found.values()
            for name, value in names.items()
        }
        listed = ", ".join(f"{layer} ({', '.join(names)})" for layer, names in found.items())
        warn(
            "boolean arguments of the calls of these layers are at their defaults, with which "
            f"training draws no random numbers, or leaves collections unchanged: {listed}. If "
            f"they say whether this is training, write {' or '.join(calls)}.",
        )
