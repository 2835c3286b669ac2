"""Equations that are cheaper to run again than to write their result to memory and read it back.

Residuals are written to memory and read from it once per microbatch. Matrix products, reductions,
random bits and unknown equations are not recomputed. Element-wise arithmetic, casts and reshapes
are fused with the kernels that read their results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpipe.programs.jaxpr import name_of, primitives

# A slice at an index is one read of an array that is already in memory.
_CHEAP = (
    primitives.ARITHMETIC
    | primitives.COMPARISONS
    | primitives.FORMS
    | primitives.RANDOM_KEYS
    | {primitives.SUM_OF_COTANGENTS, primitives.NAMED, primitives.ROUNDING, primitives.SLICE_AT}
)


def is_cheap(eqn: Any) -> bool:
    """True if an equation may be recomputed: it is element-wise, or changes shape or memory."""
    return name_of(eqn) in _CHEAP


def is_kept_in_branches(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Decide what JAX keeps in a branch of a `cond`, as a policy of `jax.checkpoint`."""
    # In a branch JAX keeps a value or recomputes it, but cannot keep a later value instead. So the
    # policy keeps comparisons, of one byte per element, instead of the random bits from which
    # dropout masks are made.
    return (
        primitive.name in primitives.COMPARISONS
        or primitive.name not in _CHEAP | primitives.RANDOM_BITS
    )


def without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a policy of `jax.checkpoint`: recompute complex values, and otherwise ask `policy`."""
    # JAX (0.10) rounds the values that a policy keeps to their own precision, and raises for
    # complex values.
    return functools.partial(_decide, policy)


def _decide(policy: Callable[..., Any], primitive: Any, *inputs: Any, **params: Any) -> Any:
    # Not all inputs of a policy are arrays, and only casts name the dtype of their result.
    dtypes = [*(getattr(x, "dtype", jnp.bool_) for x in inputs), params.get("new_dtype", jnp.bool_)]
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    if is_complex or primitive.name in primitives.MAKING_COMPLEX:
        return False
    return policy(primitive, *inputs, **params)
