"""The name of attention kernels' results, and the policy that keeps them."""

from typing import Any

from jaxpipe.programs.jaxpr import is_named, primitives

KERNEL = "jaxpipe_attention_kernel"
"""The name of the values that `jaxpipe.attention` keeps for its backward besides q, k and v."""


def keep_kernels(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The `jax.checkpoint` policy that keeps only the results of attention kernels.

    A recomputed layer then does not run its attention kernels a second time. The policy keeps the
    output and the logarithms of the row sums of `jaxpipe.attention`, and the results of cuDNN's
    attention (`jax.nn.dot_product_attention`) and of custom kernels (Pallas, `jax.ffi`). q, k and v
    are recomputed with matrix products. The cost is one activation per layer and microbatch, in
    addition to the layer's input. With weights sharded over an automatic axis, keep the results of
    reductions too: `jax.checkpoint_policies.save_from_both_policies(keep_kernels, save_reduced)`.

    Args:
        primitive: The primitive whose results may be kept.
        *inputs: Shapes and dtypes of its operands.
        **params: Its parameters.

    Returns:
        Whether its results are kept.

    Example:
        >>> import flax.linen as nn, jaxpipe
        >>> from jaxpipe.checkpointing import keep_kernels
        >>> jaxpipe.LayerSpec(nn.Dense, 8).remat(keep_kernels)
        Dense(8).remat(policy=keep_kernels)
    """
    if is_named(primitive, params, [KERNEL]):
        return True
    return primitive.name in primitives.KERNELS or primitive.name.startswith(
        primitives.CUDNN_ATTENTION
    )
