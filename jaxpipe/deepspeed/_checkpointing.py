"""Names of DeepSpeed's `checkpointing` that say nothing new here, or nothing at all."""

import warnings

from jaxpipe._numbers import as_integer
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import ConfigError, refused
from jaxpipe.recompute import checkpoint

non_reentrant_checkpoint = checkpoint
"""DeepSpeed's second name of `checkpoint`: JAX has one kind of recompute, and it is not reentrant.
"""


_AUTOGRAD = (
    "JAX differentiates functions and has no autograd objects. Use "
    "jaxpipe.checkpointing.checkpoint(function, *args), and jax.grad or jax.vjp around it."
)


class CheckpointFunction:
    """DeepSpeed's autograd function.

    `CheckpointFunction.apply(function, *args)` is `checkpoint(function, *args)`.

    There is no list of outputs to pass beside it, nothing to construct, and no `forward` or
    `backward` to call: JAX differentiates functions.

    Raises:
        PipelineError: It is constructed.
    """

    __init__ = refused("CheckpointFunction", _AUTOGRAD)
    apply = staticmethod(checkpoint)
    forward = staticmethod(refused("CheckpointFunction.forward", _AUTOGRAD))
    backward = staticmethod(refused("CheckpointFunction.backward", _AUTOGRAD))


def reset() -> None:
    """Do nothing: no buffers are held between calls, so there are none to free after an evaluation.

    DeepSpeed's name. The settings stay, as they do there.
    """


def set_num_layers(nlayers: int) -> None:
    """No effect, with a warning.

    DeepSpeed sizes its contiguous buffer by it, and there is no such buffer.

    Args:
        nlayers: Number of layers.

    Raises:
        ConfigError: It is no positive integer.
    """
    _check_num_layers(nlayers)
    warnings.warn(
        "No effect: num_checkpoints (activation_checkpointing.number_checkpoints): there is no "
        "buffer whose size it would give.",
        ConfigWarning,
        stacklevel=2,
    )


def _check_num_layers(nlayers: object) -> None:
    if as_integer(nlayers, 1) is None:
        raise ConfigError(
            f"num_checkpoints must be an integer >= 1, but got num_checkpoints={nlayers!r}. Give "
            "the number of recomputed groups, or leave it out."
        )
