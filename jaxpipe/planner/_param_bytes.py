"""How much memory a parameter takes with all that training holds for it."""

import jax
import optax

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, cast_floats
from jaxpipe.optim import state_struct
from jaxpipe.state import grad_accum_struct


def bytes_per_param(
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    *,
    compute_dtype: object = None,
    grad_dtype: object = None,
    num_shards: int = 1,
) -> float:
    """Bytes that a device holds during a step for each parameter of its stage, the mean over the model.

    These are the parameter as it is kept and the optimiser's numbers for it, both divided by ZeRO-1; its gradient; and
    where it is computed with in another dtype, or is gathered for it, what it is computed with.

    Args:
        trace: The model's shapes.
        optimizer: What updates it.
        compute_dtype: What layers compute in; None: as they make their parameters.
        grad_dtype: What gradients are summed in; None: float32, or the parameters' dtype where that is wider.
        num_shards: Replicas over which ZeRO-1 divides; 1: it does not.

    Returns:
        Bytes: 16 for float32 under Adam.

    Raises:
        ConfigError: The optimiser does not take these parameters.
    """
    made = trace.tree()
    num_params = sum(x.size for x in jax.tree.leaves(made))
    if not num_params:
        return 0.0
    kept = made if compute_dtype is None else cast_floats(made, "float32")
    computed = cast_floats(made, compute_dtype)
    summed = jax.tree.map(lambda x: grad_accum_struct(x, grad_dtype), computed)
    divided = _num_bytes(kept) + _num_bytes(state_struct(optimizer, kept))
    is_copied = compute_dtype is not None or num_shards > 1
    return (divided / num_shards + is_copied * _num_bytes(computed) + _num_bytes(summed)) / num_params


def _num_bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
