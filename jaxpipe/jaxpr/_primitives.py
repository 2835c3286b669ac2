"""Names of JAX's primitives by meaning, and the programs inside an equation.

All that this library knows of primitives by name stands here. `tests/jaxpr/test_primitives.py` fails with the name of
one that the installed JAX does not have.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

CALLS = frozenset({"jit", "closed_call"})
"""Run their program as it stands."""

REGIONS = frozenset({"remat2"})
"""`jax.checkpoint`: run their program, and its derivative by the region's own policy."""

CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Run their program; its derivative is another one."""

ARITHMETIC = frozenset(
    {"abs", "add", "clamp", "complex", "conj", "div", "imag", "integer_pow", "max", "min", "mul", "neg", "pow", "real"}
    | {"rem", "round", "sign", "sub", "cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "rsqrt", "sin"}
    | {"sqrt", "square", "tanh", "and", "not", "or", "xor", "shift_left", "shift_right_arithmetic"}
    | {"shift_right_logical", "select_n"}
)
"""Each element of the result from the same element of the operands."""

COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})
"""The same with booleans as result."""

ELEMENTWISE = ARITHMETIC | COMPARISONS | {"cbrt", "ceil", "floor", "nextafter"}
"""All that is element-wise, also what is too rare to have been measured as cheap."""

FORMS = frozenset(
    {"bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "device_put", "iota"}
    | {"optimization_barrier", "pad", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose"}
)
"""Change shape, type or memory; XLA computes them inside of what reads them."""

CASTS = frozenset({"convert_element_type", "copy", "stop_gradient"})
"""One operand of the result's shape, element by element."""

FILLS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
"""Give a number the shape and dtype in which it is used."""

RANDOM_KEYS = frozenset({"random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"})
"""Make keys of keys: a few integers."""

RANDOM_BITS = frozenset({"random_bits", "threefry2x32"})
"""Draw numbers from a key."""

DEVICE_RANDOM_BITS = frozenset({"rng_bit_generator", "rng_uniform"})
"""Draw numbers with a generator of the device, whose numbers depend on how the result is sharded."""

CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback"})
"""Call Python back while the program runs."""

MAKING_COMPLEX = frozenset({"complex", "eig", "fft"})
"""Make complex numbers of real ones."""

REDUCTIONS = frozenset(
    {"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor"}
    | {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
)
"""Sums, products, extremes along dims or in windows."""

SCATTERS = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})
"""Write into an array at indices."""

COMBINING = SCATTERS | {"reduce", "reduce_window"}
"""Hold a program of two elements, which they run for each element; not a program of arrays."""

KERNELS = frozenset({"ffi_call", "pallas_call"})
"""Programs of unknown content."""

CUDNN_ATTENTION = "dot_product_attention_fwd"
"""Begins the names of cuDNN's attention kernels; no set, as JAX has them only where there is cuDNN."""

CUDNN_ATTENTION_BACKWARD = "dot_product_attention_bwd"
"""Begins the names of their backwards."""

PLAIN_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Products and convolutions whose operations are counted."""

PRODUCTS = KERNELS | PLAIN_PRODUCTS | {"scaled_dot", "scaled_matmul_wrapper"}
"""Products and convolutions; kernels of unknown content count as such."""


def is_barrier(eqn: Any) -> bool:
    """True if an equation hands on each of its operands by itself, and only forbids the compiler to look through."""
    return eqn.primitive.name == "optimization_barrier"


def is_call(eqn: Any) -> bool:
    """True if an equation does no more than run its program, whatever that says of the derivative."""
    return eqn.primitive.name in CALLS | REGIONS | CUSTOM_RULES


def programs_inside(eqn: Any) -> list[ClosedJaxpr]:
    """The programs that an equation calls, repeats or chooses from, in the order of its parameters."""
    # By type, not by name: each primitive has its own name for the parameter that holds its program.
    return [program for value in eqn.params.values() for program in _programs(value)]


def all_equations(eqns: Iterable[Any], follow: Callable[[Any], bool] = lambda eqn: True) -> Iterator[Any]:
    """Equations, each before those of the programs inside it.

    Args:
        eqns: The equations.
        follow: Tells whether to look inside an equation.
    """
    for eqn in eqns:
        yield eqn
        if follow(eqn):
            for program in programs_inside(eqn):
                yield from all_equations(program.jaxpr.eqns, follow)


def called_program(eqn: Any) -> ClosedJaxpr | None:
    """The program that a call runs, its inputs and outputs those of the equation; None for other equations."""
    return programs_inside(eqn)[0] if is_call(eqn) else None


def _programs(value: Any) -> list[ClosedJaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value]
    if isinstance(value, Jaxpr):
        return [ClosedJaxpr(value, ())]
    if isinstance(value, (tuple, list)):  # branches of a cond; the solvers of a linear solve
        return [program for item in value for program in _programs(item)]
    return []
