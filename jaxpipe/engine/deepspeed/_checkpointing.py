"""Names of DeepSpeed's `checkpointing` that are aliases here, or have no effect."""

from jaxpipe._util.warn import warn
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import refused
from jaxpipe.layers.recompute import checkpoint

non_reentrant_checkpoint = checkpoint
"""DeepSpeed's second name for `checkpoint`. JAX has one kind of recompute, which is not reentrant.
"""


_AUTOGRAD = (
    "JAX differentiates functions and has no autograd objects. Use "
    "jaxpipe.checkpointing.checkpoint(function, *args) inside jax.grad or jax.vjp."
)


class CheckpointFunction:
    """DeepSpeed's autograd function.

    `CheckpointFunction.apply(function, *args)` is `checkpoint(function, *args)`.

    Because JAX differentiates functions, there is no list of outputs to pass, no object to
    construct, and no `forward` or `backward` to call.

    Raises:
        PipelineError: An instance is constructed.
    """

    __init__ = refused("CheckpointFunction", _AUTOGRAD)
    apply = staticmethod(checkpoint)
    forward = staticmethod(refused("CheckpointFunction.forward", _AUTOGRAD))
    backward = staticmethod(refused("CheckpointFunction.backward", _AUTOGRAD))


def reset() -> None:
    """Do nothing, because no buffers are kept between calls that an evaluation would have to free.

    The name is DeepSpeed's. As in DeepSpeed, the settings are kept.
    """


def set_num_layers(nlayers: int) -> None:
    """Warn that the setting has no effect.

    DeepSpeed uses it as the size of its contiguous buffer. There is no such buffer here.

    Args:
        nlayers: Number of layers.
    """
    warn(
        "No effect: num_checkpoints (activation_checkpointing.number_checkpoints): there is no "
        "contiguous buffer to size.",
        ConfigWarning,
    )
