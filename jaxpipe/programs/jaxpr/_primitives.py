"""Names of JAX's primitives by meaning.

This file has everything that the library knows about primitives by name, for every supported
version of JAX. `tests/programs/jaxpr/test_primitives.py` fails and names the primitive if a name
here does not exist in the installed JAX, or if JAX has a primitive that is in no set here.
"""

SCAN = "scan"
COND = "cond"
WHILE = "while"
"""Loops and branches."""

SHARD_MAP = "shard_map"
"""Runs its program on each device, with the device's shards of the operands."""

CONSTRAINT = "sharding_constraint"
"""`jax.lax.with_sharding_constraint`."""

BARRIER = "optimization_barrier"
"""Returns each of its operands unchanged."""

NAMED = "name"
"""`jax.ad_checkpoint.checkpoint_name`."""

ROUNDING = "reduce_precision"
"""Rounds to a precision given in bits."""

MOVE = "device_put"
"""Moves arrays to other devices or another memory."""

TRANSPOSE = "transpose"
"""Reorders the dims of an array."""

FILL = "broadcast_in_dim"
"""Repeats its operand along further dims."""

SUM_OF_COTANGENTS = "add_any"
"""JAX's addition of the cotangents of a value that is used several times."""

DOT = "dot_general"
CONVOLUTION = "conv_general_dilated"
RAGGED_DOT = "ragged_dot_general"
"""Matrix products and convolutions."""

SLICE_AT = "dynamic_slice"
"""Reads a block of an array at a computed index."""

LOOKUPS = frozenset({"gather", SLICE_AT})
"""Read some rows of an array."""

UPDATE = "dynamic_update_slice"
"""Writes some rows of an array."""

CALLS = frozenset({"jit", "closed_call", "eval_jaxpr"})
"""Run their program unchanged."""

REGIONS = frozenset({"remat2"})
"""`jax.checkpoint`: run their program, and differentiate it by the region's own policy."""

CUSTOM_JVP = "custom_jvp_call"
"""Runs its program. Its derivative is another program, which JAX uses when it differentiates."""

CUSTOM_RULES = frozenset({CUSTOM_JVP, "custom_vjp_call"})
"""Run their program. Its derivative is another program."""

ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "clamp",
        "complex",
        "conj",
        "div",
        "imag",
        "integer_pow",
        "max",
        "min",
        "mul",
        "neg",
        "pow",
        "real",
    }
    | {
        "rem",
        "round",
        "sign",
        "sub",
        "cos",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
    }
    | {
        "logistic",
        "one_minus_square",
        "polynomial",
        "rsqrt",
        "sin",
        "sqrt",
        "square",
        "tanh",
        "and",
        "not",
        "or",
    }
    | {"xor", "shift_left", "shift_right_arithmetic", "shift_right_logical", "select_n"}
)
"""Compute each element of the result from the same element of the operands."""

COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})
"""Element-wise with boolean results."""

ELEMENTWISE = ARITHMETIC | COMPARISONS | {"cbrt", "ceil", "floor", "nextafter"}
"""All element-wise primitives, including some that are too rare to have been measured as cheap."""

FORMS = frozenset(
    {
        "bitcast_convert_type",
        FILL,
        "concatenate",
        "convert_element_type",
        "copy",
        MOVE,
        "iota",
        BARRIER,
        "pad",
    }
    | {
        "reshape",
        "rev",
        "slice",
        "split",
        "squeeze",
        "stack",
        "stop_gradient",
        "tile",
        TRANSPOSE,
        "unstack",
    }
)
"""Change shape, dtype or memory; XLA fuses them with the equations that read them."""

CASTS = frozenset({"convert_element_type", "copy", "stop_gradient"})
"""Element-wise, with one operand of the result's shape."""

RANDOM_KEYS = frozenset(
    {"random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"}
)
"""Derive keys from keys, which are a few integers."""

DRAWN = "random_bits"
"""Draws numbers from a key with the key's generator."""

RANDOM_BITS = frozenset({DRAWN, "threefry2x32"})
"""Draw numbers from a key."""

DEVICE_RANDOM_BITS = frozenset({"rng_bit_generator", "rng_uniform"})
"""Draw numbers with the device's generator; they depend on the sharding of the result."""

CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})
"""Call back into Python while the program runs."""

MAKING_COMPLEX = frozenset({"complex", "eig", "fft"})
"""Make complex numbers from real ones."""

REDUCTIONS = frozenset(
    {
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
        "reduce_xor",
    }
    | {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
)
"""Sums, products, extremes along dims or in windows."""

SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"}
)
"""Write into an array at indices."""

COMBINING = SCATTERS | {"reduce", "reduce_window"}
"""Have a program that combines two elements and runs for each element, not on arrays."""

KERNELS = frozenset({"ffi_call", "pallas_call"})
"""Programs of unknown content."""

CUDNN_ATTENTION = "dot_product_attention_fwd"
"""Prefix of the names of cuDNN's attention kernels.

It is not a set of names, because JAX only has these kernels on machines with cuDNN.
"""

CUDNN_ATTENTION_BACKWARD = "dot_product_attention_bwd"
"""Prefix of the names of the backwards of cuDNN's attention kernels."""

PLAIN_PRODUCTS = frozenset({DOT, CONVOLUTION, RAGGED_DOT})
"""Products and convolutions whose FLOPs are counted."""

PRODUCTS = KERNELS | PLAIN_PRODUCTS | {"scaled_dot", "scaled_matmul_wrapper"}
"""Products and convolutions; kernels of unknown content are treated like them."""


OTHERS = frozenset(
    {
        "acos",
        "acosh",
        "after_all",
        "all_gather",
        "all_to_all",
        "approx_top_k",
        "argmax",
        "argmin",
        "asin",
        "asinh",
    }
    | {
        "atan",
        "atan2",
        "atanh",
        "axis_index",
        "bessel_i0e",
        "bessel_i1e",
        "call",
        "cholesky",
        "clz",
        "cosh",
    }
    | {
        "create_token",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "custom_lin",
        "custom_linear_solve",
    }
    | {
        "dce_sink",
        "digamma",
        "eigh",
        "empty2",
        "eq_to",
        "erf_inv",
        "get",
        "hessenberg",
        "householder_product",
    }
    | {
        "igamma",
        "igamma_grad_a",
        "igammac",
        "inspect_sharding",
        "le_to",
        "lgamma",
        "lt_to",
        "lu",
        "mulhi",
        "pmax",
        "pmin",
        "polygamma",
    }
    | {"population_count", "ppermute", "psum", "qr", "ragged_all_to_all", "random_gamma"}
    | {"regularized_incomplete_beta", "schur", "select_and_gather_add", "select_and_scatter"}
    | {
        "select_and_scatter_add",
        "sinh",
        "sort",
        "stage",
        "svd",
        "swap",
        "tan",
        "top_k",
        "triangular_solve",
    }
    | {"tridiagonal", "tridiagonal_solve", "zeta"}
)
"""Known primitives that are intentionally in no set above.

They are too rare, too expensive to recompute, or recognised by their effects.
"""

NOT_IN_EVERY_JAX = frozenset(
    {
        "call",
        "closed_call",
        "dce_sink",
        "eval_jaxpr",
        "log2",
        "one_minus_square",
        "polynomial",
        "stack",
        "unstack",
    }
)
"""Names that at least one supported version of JAX does not have.

Patch releases add and remove names too.
"""

KNOWN = (
    CALLS
    | REGIONS
    | CUSTOM_RULES
    | ELEMENTWISE
    | FORMS
    | CASTS
    | RANDOM_KEYS
    | RANDOM_BITS
    | DEVICE_RANDOM_BITS
    | CALLBACKS
    | MAKING_COMPLEX
    | REDUCTIONS
    | COMBINING
    | PRODUCTS
    | LOOKUPS
    | OTHERS
    | {SCAN, COND, WHILE, SHARD_MAP, CONSTRAINT, NAMED, ROUNDING, SUM_OF_COTANGENTS, UPDATE}
)
"""All known primitives."""


def is_known(name: str) -> bool:
    """True if this library knows the primitive with this name."""
    return name in KNOWN or name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD))
