"""Reading and setting hyperparameters that `optax.inject_hyperparams` keeps in the state."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Reader, number
from jaxpipe.errors import ConfigError, shown

from ._check import unknown_name

_LARGEST = float(np.finfo(np.float32).max)
"""Hyperparameters are stored in float32, in which larger values would become infinite."""


def read_hyperparams(opt_state: PyTree) -> dict[str, Any] | None:
    """The hyperparameters in an optimiser's state.

    They are those of the last update, or the values set since then.

    A state may have leading dims, such as one row per stage, and may occur several times, such as
    once per group of parameters. All copies are assumed to be equal, and the first is read.

    Args:
        opt_state: The state, with states of `optax.inject_hyperparams` anywhere in it.

    Returns:
        Name to value, scalars as Python numbers; None if there is no such state.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> read_hyperparams(optimizer.init({"w": jnp.ones(2)}))
        {'learning_rate': 0.5}
    """
    found: dict[str, Any] = {}
    states = list(_states(opt_state))
    for state in states:
        for name, value in state.hyperparams.items():
            found.setdefault(name, _first(value, jnp.ndim(state.count)))
    return found if states else None


def next_hyperparams(
    opt_state: PyTree, schedules: Mapping[str, optax.Schedule]
) -> dict[str, Any] | None:
    """The hyperparameters of the next update, as in DeepSpeed's `get_lr()` and `get_mom()`.

    Args:
        opt_state: The state.
        schedules: The schedules of the hyperparameters that follow one, as `hyperparam_schedules`
            returns them. Any other hyperparameter keeps the value of the last update.

    Returns:
        Name to value, scalars as Python numbers; None if the state keeps no hyperparameters.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.5**count)
        >>> state = optimizer.update({"w": jnp.ones(2)}, optimizer.init({"w": jnp.ones(2)}))[1]
        >>> read_hyperparams(state)
        {'learning_rate': 1.0}
        >>> next_hyperparams(state, {"learning_rate": lambda count: 0.5**count})
        {'learning_rate': 0.5}
    """
    values = read_hyperparams(opt_state)
    if values is None:
        return None
    for state in _states(opt_state):
        for name in schedules.keys() & _scheduled(state):
            count = _first(state.count, jnp.ndim(state.count))
            values[name] = _plain(jnp.asarray(schedules[name](count), jnp.float32))
    return values


def set_hyperparams(opt_state: PyTree, **values: float) -> PyTree:
    """Set hyperparameters for all following updates.

    Args:
        opt_state: The state.
        values: Name to number, for instance `learning_rate=1e-4`.

    Returns:
        The state with the numbers in all copies. Shapes, dtypes and shardings do not change.

    Raises:
        ConfigError: The state keeps no hyperparameters, has none of that name, or has one that
            follows a schedule. Also if a value is not a finite number, or is outside the range that
            the configuration accepts.

    Example:
        >>> optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
        >>> state = optimizer.init({"w": jnp.ones(2)})
        >>> read_hyperparams(set_hyperparams(state, learning_rate=0.25))
        {'learning_rate': 0.25}
    """
    states = list(_states(opt_state))
    if not states:
        named = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
        raise ConfigError(
            f"Hyperparameters must lie in the optimizer's state to be set, but got {named} and a "
            "state without any. Make the optimizer from the configuration, or with "
            "optax.inject_hyperparams(optax.adamw)(...)."
        )
    known = {name for state in states for name in state.hyperparams}
    scheduled = set[str]().union(*(_scheduled(state) for state in states))
    for name, value in values.items():
        if name not in known:
            raise unknown_name("hyperparameter", name, known)
        if name in scheduled:
            raise ConfigError(
                f"{name} must not follow a schedule to be set, but got {name}={shown(value)} where "
                "a schedule decides it. Leave the schedule out, or change it instead."
            )
        real = _real(value)
        if not abs(real) <= _LARGEST:
            raise ConfigError(
                f"{name} must be a finite number, but got {name}={shown(value)}. Use for instance "
                "0.001."
            )
        _reader(name)(real, name)
    return replace_hyperparams(opt_state, values)


def replace_hyperparams(opt_state: PyTree, values: Mapping[str, Any]) -> PyTree:
    """The state with other values, which are not checked and may be traced."""
    return _replace_states(opt_state, lambda state: _with_values(state, values))


def _real(value: Any) -> float:
    """A scalar as a float; NaN if the value is not a scalar."""
    if (
        isinstance(value, np.ndarray | jax.Array)
        and not np.ndim(value)
        and jnp.issubdtype(value.dtype, jnp.number)
    ):
        value = np.asarray(value).item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _reader(name: str) -> Reader:
    """The configuration's reader for a hyperparameter of this name."""
    if name in ("b1", "b2"):
        return number(0.0, below=1.0)
    return number(
        0.0 if name in ("momentum", "weight_decay") or name.endswith("learning_rate") else None
    )


def _is_state(node: Any) -> bool:
    """True if a node has the fields that `optax.inject_hyperparams` documents for its states."""
    return isinstance(getattr(node, "hyperparams", None), Mapping) and hasattr(node, "count")


def _states(tree: PyTree) -> Iterator[Any]:
    """All states that keep hyperparameters, outer ones before inner ones."""
    for node in jax.tree.leaves(tree, is_leaf=_is_state):
        if _is_state(node):
            yield node
            yield from _states(getattr(node, "inner_state", ()))


def _scheduled(state: Any) -> set[str]:
    return set(getattr(state, "hyperparams_states", ()))


def _replace_states(tree: PyTree, change: Callable[[Any], Any]) -> PyTree:
    def changed(node: Any) -> Any:
        if not _is_state(node):
            return node
        node = change(node)
        if not hasattr(node, "inner_state"):
            return node
        return _copy(node, inner_state=_replace_states(node.inner_state, change))

    return jax.tree.map(changed, tree, is_leaf=_is_state)


def _with_values(state: Any, values: Mapping[str, Any]) -> Any:
    hyperparams = {
        name: _filled(old, values[name]) if name in values else old
        for name, old in state.hyperparams.items()
    }
    return _copy(state, hyperparams=hyperparams)


def _copy(state: Any, **changes: Any) -> Any:
    replace_named = getattr(state, "_replace", None)
    return replace(state, **changes) if replace_named is None else replace_named(**changes)


def _filled(old: Any, value: Any) -> Any:
    """A number broadcast to the shape, dtype and sharding of an array."""
    # A traced value has no sharding yet.
    if isinstance(old, Tracer):
        return jnp.full(jnp.shape(old), value, jnp.result_type(old))
    filled = np.full(np.shape(old), value, jnp.result_type(old))
    # Use the old value's sharding: an array on one device cannot be a row of a mesh that several
    # processes share.
    return jax.device_put(filled, old.sharding) if isinstance(old, jax.Array) else filled


def _first(value: Any, num_leading: int) -> Any:
    """The first row of an array on this process's devices."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        # Rows of other processes cannot be read here. This is not needed, because all are equal.
        value = value.addressable_shards[0].data
    return _plain(value[(0,) * num_leading] if num_leading else value)


def _plain(value: Any) -> Any:
    """A scalar as a Python number, if it has a value."""
    if isinstance(value, Tracer) or jnp.ndim(value):
        return value
    return np.asarray(value).item()
