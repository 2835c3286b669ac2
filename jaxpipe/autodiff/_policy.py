"""Equations that cost less to run again than it costs to write their result to memory and to read it back.

What waits in a ring is written once and read once per microbatch, through memory. Products, reductions, random bits and
whatever is not known are not run again; element-wise arithmetic and changes of form are part of the fusions that read
their results.
"""

from typing import Any

_ARITHMETIC = frozenset(
    {"abs", "add", "clamp", "complex", "conj", "div", "imag", "integer_pow", "max", "min", "mul", "neg", "pow", "real"}
    | {"rem", "round", "sign", "sub", "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "rsqrt", "sin"}
    | {"sqrt", "square", "tanh", "and", "not", "or", "xor", "shift_left", "shift_right_arithmetic"}
    | {"shift_right_logical", "select_n"}
)
_FORMS = frozenset(
    {"add_any", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "device_put"}
    | {"dynamic_slice", "expand_dims", "iota", "name", "optimization_barrier", "pad", "random_fold_in", "random_seed"}
    | {"random_split", "random_unwrap", "random_wrap", "reduce_precision", "reshape", "rev", "slice", "split"}
    | {"squeeze", "stop_gradient", "transpose"}
)
_COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})
_RANDOM_BITS = frozenset({"random_bits", "threefry2x32"})


def is_cheap(eqn: Any) -> bool:
    """Whether an equation is run again where that leaves less to hold: it is element-wise or changes a form."""
    return _is_cheap(eqn.primitive.name)


def is_kept_in_branches(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The policy for a branch of a `cond`, where JAX keeps a value or computes it again, but cannot take a later one.

    So comparisons, one byte each, are kept instead of the random bits that masks of dropout come from.
    """
    is_bits = primitive.name in _RANDOM_BITS
    return primitive.name in _COMPARISONS or not (is_bits or _is_cheap(primitive.name))


def is_arithmetic(name: str) -> bool:
    """Whether a primitive computes each element of its result from the same element of its operands."""
    return name in _ARITHMETIC


def _is_cheap(name: str) -> bool:
    return name in _FORMS or name in _COMPARISONS or is_arithmetic(name)
