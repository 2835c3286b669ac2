"""What recompute does with the inputs it keeps, and where a program finds the settings that hold."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from jaxpipe.config import ConfigWarning


@dataclass(frozen=True)
class RecomputeSettings:
    """What `checkpoint` keeps for the backward pass, and where.

    Attributes:
        partition_activations: Each device of the `model` axis keeps its own share of a function's inputs.
        checkpoint_in_cpu: The inputs are kept in host memory.
        profile: Name the function in profiles.
        configured: Whether `configure` made these settings.
    """

    partition_activations: bool = False
    checkpoint_in_cpu: bool = False
    profile: bool = False
    configured: bool = False


_CURRENT: ContextVar[RecomputeSettings] = ContextVar("jaxpipe_recompute_settings")
"""The settings that hold here.

DeepSpeed's `checkpoint(function, *args)` has no argument for them, so they have to be found where it is called, deep
in a layer. A context variable with an immutable value is the least that does this: it is separate per thread and
task, and a program that is traced under `use_settings` leaves nothing behind.
"""


_FOLLOWER: ContextVar[list[None] | None] = ContextVar("jaxpipe_recompute_follower")
"""A mark for each function that followed the settings of the innermost `check_settings`."""


def current_settings() -> RecomputeSettings:
    """The settings that `checkpoint` follows here: those of the innermost `use_settings`, or of `configure`."""
    return _CURRENT.get(RecomputeSettings())


def follow_settings() -> RecomputeSettings:
    """The settings that hold here, asked for by what follows them."""
    follower = _FOLLOWER.get(None)
    if follower is not None:
        follower.append(None)
    return current_settings()


def set_settings(settings: RecomputeSettings) -> None:
    """Make settings hold from now on in this thread, or up to the end of the surrounding `use_settings`."""
    _CURRENT.set(settings)


@contextmanager
def check_settings(settings: RecomputeSettings) -> Iterator[None]:
    """As `use_settings`, with a warning after the block where a configuration's settings found nothing to follow them.

    Args:
        settings: What `checkpoint` follows inside the block, in which a whole model is traced.

    Yields:
        Nothing.
    """
    marks: list[None] = []
    token = _FOLLOWER.set(marks)
    try:
        with use_settings(settings):
            yield
    finally:
        _FOLLOWER.reset(token)
    keys = {
        "partition_activations": settings.partition_activations,
        "cpu_checkpointing": settings.checkpoint_in_cpu,
        "profile": settings.profile,
    }
    asked = [f"activation_checkpointing.{key}" for key, value in keys.items() if value]
    if asked and not marks and not settings.configured:
        warnings.warn(
            f"No effect: {' and '.join(asked)}, because no layer is recomputed. Set "
            "pipeline.activation_checkpoint_interval to the number of layers in a recomputed group, mark layers with "
            "LayerSpec(...).remat(), or call jaxpipe.checkpointing.checkpoint in a layer.",
            ConfigWarning,
            stacklevel=3,
        )


@contextmanager
def use_settings(settings: RecomputeSettings) -> Iterator[None]:
    """Make settings hold inside a `with` block; those from before hold again after it.

    Args:
        settings: What `checkpoint` follows inside the block. A program that is traced there keeps to them for good.

    Yields:
        Nothing.
    """
    token = _CURRENT.set(settings)
    try:
        yield
    finally:
        _CURRENT.reset(token)
