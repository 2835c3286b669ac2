"""Names the results of reductions over automatic axes, and provides policies that keep them.

If weights are sharded, a matrix product sums over devices. XLA's partitioner inserts this sum, so
it is not an equation that a policy could recognise. Layers therefore name the result of the sum.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpipe._util.typing import PyTree

from ._equation import constraint_is_whole, is_named

REDUCED = "reduced"
"""Name of reduced values, for `jax.ad_checkpoint.checkpoint_name(x, REDUCED)`."""


def reduced(values: PyTree) -> PyTree:
    """Name values as results of a reduction over devices.

    An example is the output of a layer's row-sharded matrix product. Recompute keeps values with
    this name, so the reduction does not run again; see `save_reduced`. Otherwise the name has no
    effect.

    Args:
        values: A pytree of arrays.

    Returns:
        The same values.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, REDUCED), values)


def save_reduced(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keep values named `REDUCED`, in addition to a function's inputs.

    This `jax.checkpoint` policy is the default of recompute on meshes with axes other than `stage`,
    `data` and `fsdp`. Each named value takes memory once per recomputed group and microbatch, and
    saves one all-reduce in the backward.

    Args:
        primitive: The primitive of the equation in question.
        *inputs: Shapes and dtypes of the equation's operands.
        **params: Parameters of the equation.

    Returns:
        Whether the equation's results are kept.
    """
    # JAX (0.10) rounds the values that a policy keeps to their own precision, and raises for
    # complex values.
    return is_named(primitive, params, [REDUCED]) and not _has_complex(inputs)


def save_whole(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """Keep values named `REDUCED` and results of constraints that make a value whole.

    This `jax.checkpoint` policy is `save_reduced` for layers that do not name their values. Layers
    that were annotated for other libraries replicate a sum with a sharding constraint that makes it
    whole on each device. They also constrain many other values, such as norms and sums of the
    residual stream, and all of them are kept. Therefore this policy is not the default.

    Args:
        primitive: The primitive of the equation in question.
        *inputs: Shapes and dtypes of the equation's operands.
        **params: Parameters of the equation.

    Returns:
        Whether the equation's results are kept.
    """
    if save_reduced(primitive, *inputs, **params):
        return True
    return constraint_is_whole(primitive, params) and not _has_complex(inputs)


def _has_complex(values: Any) -> bool:
    return any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in values)
