"""Which intermediate values are worth keeping between forward and backward.

What waits in a ring is written once and read once per microbatch, through memory. Products, reductions and whatever
is not known are kept; element-wise arithmetic between them costs less to do again, inside the fusions of the
backward, than to write and read.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr

_ARITHMETIC = (
    *("abs", "add", "clamp", "div", "integer_pow", "max", "min", "mul", "neg", "pow", "rem", "round", "sign", "sub"),
    *("cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "rsqrt", "sin", "sqrt", "square", "tanh"),
    *("and", "not", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "select_n"),
)
_SHAPES = (
    *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "iota"),
    *("dynamic_slice", "pad", "reshape", "rev", "slice", "squeeze", "transpose"),
)
_RANDOM = ("random_bits", "random_fold_in", "random_unwrap", "random_wrap", "threefry2x32")
_CHEAP = frozenset((*_ARITHMETIC, *_SHAPES, *_RANDOM))
_RECOMPUTE = frozenset({"checkpoint", "remat", "remat2"})


def keep_products(function: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute element-wise arithmetic in the backward of a function, and keep the rest.

    Comparisons are kept, as one byte each: they are the masks of dropout and of piecewise functions.

    Args:
        function: Any traceable function.

    Returns:
        The same function with another choice of residuals.
    """
    return jax.checkpoint(function, policy=_is_kept, prevent_cse=False)


def asks_for_recompute(jaxpr: Jaxpr) -> bool:
    """Whether a traced function recomputes some part by itself.

    Such a function has said what is to be kept; a choice made around it would take the place of its own.
    """
    for eqn in jaxpr.eqns:
        values = [v for value in eqn.params.values() for v in (value if isinstance(value, tuple) else (value,))]
        inner = [getattr(value, "jaxpr", value) for value in values]
        if eqn.primitive.name in _RECOMPUTE or any(asks_for_recompute(j) for j in inner if isinstance(j, Jaxpr)):
            return True
    return False


def is_arithmetic(name: str) -> bool:
    """Whether a primitive computes each element of its result from the same element of its operands."""
    return name in _ARITHMETIC


def _is_kept(primitive: Any, *inputs: Any, **params: Any) -> bool:
    return primitive.name not in _CHEAP
