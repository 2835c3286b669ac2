"""Equations that cost less to run again than writing their result to memory and reading it back.

Residuals are written once and read once per microbatch, through memory. Products, reductions,
random bits and whatever is not known are not run again; element-wise arithmetic and changes of form
are part of the fusions that read their results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpipe.jaxpr import name_of, primitives

# A slice at an index is one read of what lies in memory already.
_CHEAP = (
    primitives.ARITHMETIC
    | primitives.COMPARISONS
    | primitives.FORMS
    | primitives.RANDOM_KEYS
    | {primitives.SUM_OF_COTANGENTS, primitives.NAMED, primitives.ROUNDING, primitives.SLICE_AT}
)


def is_cheap(eqn: Any) -> bool:
    """True if an equation is run again where that leaves fewer residuals.

    It is element-wise or changes a form.
    """
    return name_of(eqn) in _CHEAP


def is_kept_in_branches(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The policy for a branch of a `cond`.

    There JAX keeps a value or computes it again, but cannot take a later one. So comparisons, one
    byte each, are kept instead of the random bits that masks of dropout come from.
    """
    return (
        primitive.name in primitives.COMPARISONS
        or primitive.name not in _CHEAP | primitives.RANDOM_BITS
    )


def without_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy of `jax.checkpoint` that recomputes complex numbers and asks `policy` for the rest.

    JAX (0.10) rounds what a policy keeps to the precision that it has, and raises where that is
    complex.
    """
    return functools.partial(_decide, policy)


def _decide(policy: Callable[..., Any], primitive: Any, *inputs: Any, **params: Any) -> Any:
    # Not everything that a policy is asked about is an array, and casts alone name the dtype of
    # their result.
    dtypes = [*(getattr(x, "dtype", jnp.bool_) for x in inputs), params.get("new_dtype", jnp.bool_)]
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    if is_complex or primitive.name in primitives.MAKING_COMPLEX:
        return False
    return policy(primitive, *inputs, **params)
