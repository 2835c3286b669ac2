"""Names of JAX's primitives by meaning.

All that this library knows of primitives by name stands here, for every version of JAX that it runs
on. `tests/jaxpr/test_primitives.py` fails with the name of one that the installed JAX does not
have, and with the name of one that JAX has and no set here does.
"""

SCAN, COND, WHILE = "scan", "cond", "while"
"""Loops and branches."""

SHARD_MAP = "shard_map"
"""Runs its program on each device, with its share of the operands."""

CONSTRAINT = "sharding_constraint"
"""`jax.lax.with_sharding_constraint`."""

BARRIER = "optimization_barrier"
"""Hands on each of its operands by itself."""

NAMED = "name"
"""`jax.ad_checkpoint.checkpoint_name`."""

ROUNDING = "reduce_precision"
"""Rounds to a precision that is given in bits."""

MOVE = "device_put"
"""Moves to other devices or another memory."""

TRANSPOSE = "transpose"
"""Reorders the dims of an array."""

FILL = "broadcast_in_dim"
"""Repeats its operand along further dims."""

SUM_OF_COTANGENTS = "add_any"
"""JAX's own addition, where a value is used several times."""

DOT, CONVOLUTION, RAGGED_DOT = "dot_general", "conv_general_dilated", "ragged_dot_general"
"""Products of matrices and convolutions."""

SLICE_AT = "dynamic_slice"
"""Reads a block of an array at an index that is computed."""

LOOKUPS = frozenset({"gather", SLICE_AT})
"""Read some rows of an array."""

UPDATE = "dynamic_update_slice"
"""Writes some rows of an array."""

CALLS = frozenset({"jit", "closed_call", "eval_jaxpr"})
"""Run their program as it stands."""

REGIONS = frozenset({"remat2"})
"""`jax.checkpoint`: run their program, and its derivative by the region's own policy."""

CUSTOM_JVP = "custom_jvp_call"
"""Runs its program; its derivative is another one, which JAX applies when it differentiates."""

CUSTOM_RULES = frozenset({CUSTOM_JVP, "custom_vjp_call"})
"""Run their program; its derivative is another one."""

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
"""Each element of the result from the same element of the operands."""

COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})
"""The same with booleans as result."""

ELEMENTWISE = ARITHMETIC | COMPARISONS | {"cbrt", "ceil", "floor", "nextafter"}
"""All that is element-wise, also what is too rare to have been measured as cheap."""

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
"""Change shape, type or memory; XLA computes them inside of what reads them."""

CASTS = frozenset({"convert_element_type", "copy", "stop_gradient"})
"""One operand of the result's shape, element by element."""

FILLS = frozenset({FILL, "convert_element_type", "reshape", "squeeze"})
"""Give a number the shape and dtype in which it is used."""

RANDOM_KEYS = frozenset(
    {"random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap"}
)
"""Make keys of keys: a few integers."""

DRAWN = "random_bits"
"""Draws numbers from a key, with the key's generator."""

RANDOM_BITS = frozenset({DRAWN, "threefry2x32"})
"""Draw numbers from a key."""

DEVICE_RANDOM_BITS = frozenset({"rng_bit_generator", "rng_uniform"})
"""Draw numbers with a generator of the device, whose numbers depend on how the result is sharded.
"""

CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback"})
"""Call Python back while the program runs."""

MAKING_COMPLEX = frozenset({"complex", "eig", "fft"})
"""Make complex numbers of real ones."""

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
"""Hold a program of two elements, which they run for each element; not a program of arrays."""

KERNELS = frozenset({"ffi_call", "pallas_call"})
"""Programs of unknown content."""

CUDNN_ATTENTION = "dot_product_attention_fwd"
"""Begins the names of cuDNN's attention kernels; no set, as JAX has them only where there is cuDNN.
"""

CUDNN_ATTENTION_BACKWARD = "dot_product_attention_bwd"
"""Begins the names of their backwards."""

PLAIN_PRODUCTS = frozenset({DOT, CONVOLUTION, RAGGED_DOT})
"""Products and convolutions whose operations are counted."""

PRODUCTS = KERNELS | PLAIN_PRODUCTS | {"scaled_dot", "scaled_matmul_wrapper"}
"""Products and convolutions; kernels of unknown content count as such."""


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
"""Known, and in no set above on purpose.

Too rare, too dear to run again, or looked for by its effect.
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
"""Names that one of the versions of JAX which this library runs on lacks.

Patch releases bring and take them, too.
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
"""All of them."""


def is_known(name: str) -> bool:
    """True if this library knows what a primitive of this name does."""
    return name in KNOWN or name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD))
