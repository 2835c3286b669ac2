"""Policies of `jax.checkpoint` where there are complex numbers."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

_MAKING_COMPLEX = frozenset({"complex", "eig", "fft"})
"""Equations that make complex numbers of real ones."""


def without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy that recomputes complex numbers and asks another for the rest.

    JAX (0.10) rounds what a policy keeps to the precision that it has, and raises where that is complex.

    Args:
        policy: The policy for the rest.
    """
    return functools.partial(_decide, policy)


def _decide(policy: Callable[..., Any], primitive: Any, *inputs: Any, **params: Any) -> Any:
    dtypes = [*(getattr(x, "dtype", jnp.bool_) for x in inputs), params.get("new_dtype", jnp.bool_)]
    if primitive.name in _MAKING_COMPLEX or any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        return False
    return policy(primitive, *inputs, **params)
