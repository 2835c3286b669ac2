"""The values of a layer that a reduction over automatic axes has given.

Their name, and policies that keep them.

Where weights are sharded, a product sums over devices. Such a sum is no equation of its own that a
policy could ask for: XLA's partitioner adds it. So layers name what comes out of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpipe._typing import PyTree

from ._equation import constraint_is_whole, is_named

REDUCED = "reduced"
"""The name, for `jax.ad_checkpoint.checkpoint_name(x, REDUCED)`."""


def reduced(values: PyTree) -> PyTree:
    """Name values as results of a reduction over devices.

    One such is the output of a layer's row-sharded product. Recompute keeps what has this name and
    so does not reduce again; see `save_reduced`. Elsewhere it changes nothing.

    Args:
        values: A pytree of arrays.

    Returns:
        The same.
    """
    return jax.tree.map(lambda x: checkpoint_name(x, REDUCED), values)


def save_reduced(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The `jax.checkpoint` policy that keeps what is named `REDUCED`, beside a function's inputs.

    It is the default of recompute on meshes with axes other than `stage`, `data` and `fsdp`: each
    named value costs its memory once a recomputed group and microbatch, and saves one all-reduce in
    the backward.

    Args:
        primitive: What is asked about.
        *inputs: Shapes and dtypes of its operands.
        **params: Its parameters.

    Returns:
        Whether its results are kept.
    """
    # JAX (0.10) rounds what a policy keeps to the precision that it has, and raises where that is
    # complex.
    return is_named(primitive, params, [REDUCED]) and not _has_complex(inputs)


def save_whole(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """`save_reduced` for layers that name nothing.

    Also keeps what a sharding constraint makes whole on each device.

    Layers that were annotated for others bring a sum to each device by such a constraint, but
    constrain much else, too, norms and sums of the residual stream for instance, and all of that is
    kept. Hence it is no default.

    Args:
        primitive: What is asked about.
        *inputs: Shapes and dtypes of its operands.
        **params: Its parameters.

    Returns:
        Whether its results are kept.
    """
    if save_reduced(primitive, *inputs, **params):
        return True
    return constraint_is_whole(primitive, params) and not _has_complex(inputs)


def _has_complex(values: Any) -> bool:
    return any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in values)
