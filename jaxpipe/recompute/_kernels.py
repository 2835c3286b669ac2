"""The results of attention kernels: their name, and the policy that keeps them."""

from typing import Any

from jaxpipe.jaxpr import is_named, primitives

KERNEL = "attention_kernel"
"""The name of what `jaxpipe.attention` keeps for its backward beside q, k and v."""


def keep_kernels(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """The `jax.checkpoint` policy that keeps what attention kernels give, and nothing else.

    A recomputed layer then runs no attention kernel a second time: the output and the logarithms of
    the rows' sums of `jaxpipe.attention` are kept, as are the results of cuDNN's attention
    (`jax.nn.dot_product_attention`) and of kernels of one's own (Pallas, `jax.ffi`). q, k and v are
    computed again, by products. It costs one activation a layer and microbatch, beside the layer's
    input. With weights sharded over an automatic axis, keep the results of reductions too:
    `jax.checkpoint_policies.save_from_both_policies(keep_kernels, save_reduced)`.

    Args:
        primitive: What is asked about.
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
