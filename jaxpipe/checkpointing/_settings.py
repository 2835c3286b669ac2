"""What recompute does with the inputs it keeps, and where a program finds the settings that hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


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


def current_settings() -> RecomputeSettings:
    """The settings that `checkpoint` follows here: those of the innermost `use_settings`, or of `configure`."""
    return _CURRENT.get(RecomputeSettings())


def set_settings(settings: RecomputeSettings) -> None:
    """Make settings hold from now on in this thread, or up to the end of the surrounding `use_settings`."""
    _CURRENT.set(settings)


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
