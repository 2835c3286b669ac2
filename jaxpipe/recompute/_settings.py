"""Settings of recompute.

How kept inputs are kept, and how a call of `checkpoint` finds what holds for it.
"""

import dataclasses
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jaxpipe.config import ConfigWarning


@dataclass(frozen=True)
class RecomputeSettings:
    """Form in which `checkpoint` stores inputs for the backward pass.

    Attributes:
        partition_activations: Each device of the `model` axis keeps its own share of a function's
            inputs.
        checkpoint_in_cpu: The inputs are kept in host memory.
        profile: Name the function in profiles.
        configured: Whether `configure` made these settings.
    """

    partition_activations: bool = False
    checkpoint_in_cpu: bool = False
    profile: bool = False
    configured: bool = False


@dataclass
class Scope:
    """Settings that hold somewhere.

    Attributes:
        settings: The settings.
        is_followed: Whether a call of `checkpoint` has followed them.
        mesh: What a pipeline traces its programs for; None outside of one.
        notes: What has been said of the layers that were traced here.
    """

    settings: RecomputeSettings = RecomputeSettings()
    is_followed: bool = False
    mesh: Mesh | None = None
    notes: set[str] = field(default_factory=set[str])


_SCOPE: ContextVar[Scope] = ContextVar("jaxpipe_recompute_scope")
"""The settings that hold here.

DeepSpeed's `checkpoint(function, *args)` has no argument for them, and it is called deep in layers
of the user's own, so they have to be found there. A context variable is the least that does this:
it is separate per thread and task, and a program that is traced under `use_settings` leaves nothing
behind. Down to the pipeline that traces, settings are arguments.
"""


def current_settings() -> RecomputeSettings:
    """The settings that `checkpoint` follows here.

    Those of the innermost `use_settings`, or of `configure`.
    """
    return _SCOPE.get(Scope()).settings


def follow_settings() -> RecomputeSettings:
    """The settings that hold here, asked for by what follows them."""
    scope = _SCOPE.get(Scope())
    scope.is_followed = True
    return scope.settings


def set_settings(settings: RecomputeSettings) -> None:
    """Make settings hold in this thread from now on, or to the end of the `use_settings` around."""
    _SCOPE.set(dataclasses.replace(_SCOPE.get(Scope()), settings=settings, is_followed=False))


def traced_mesh() -> Mesh | None:
    """The mesh that a pipeline traces its programs for, as it was given; None outside of one.

    Variables are traced without a mesh around them, and an abstract one knows no devices.
    """
    return _SCOPE.get(Scope()).mesh


def is_first(note: str) -> bool:
    """True if a note of a layer has not been made before in this trace of a model.

    Always, outside a pipeline.
    """
    notes = _SCOPE.get(Scope()).notes
    is_new = note not in notes
    notes.add(note)
    return is_new


@contextmanager
def use_settings(settings: RecomputeSettings, mesh: Mesh | None = None) -> Generator[Scope]:
    """Make settings hold inside a `with` block; those from before hold again after it.

    Args:
        settings: What `checkpoint` follows inside the block. A program that is traced there keeps
            to them for good.
        mesh: What it will run on; None where that is JAX's default device.

    Yields:
        The scope, which tells whether anything followed the settings.
    """
    scope = Scope(settings, mesh=mesh)
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def warn_unfollowed(settings: RecomputeSettings) -> None:
    """Warn of settings of a configuration that nothing in a whole traced model followed.

    Args:
        settings: The settings; those of `configure` may be meant for another model.
    """
    keys = {
        "partition_activations": settings.partition_activations,
        "cpu_checkpointing": settings.checkpoint_in_cpu,
        "profile": settings.profile,
    }
    asked = [f"activation_checkpointing.{key}" for key, value in keys.items() if value]
    if asked and not settings.configured:
        warnings.warn(
            f"No effect: {' and '.join(asked)}, because no layer is recomputed. Set "
            "pipeline.activation_checkpoint_interval to the number of layers in a recomputed "
            "group, mark layers with LayerSpec(...).remat(), or call "
            "jaxpipe.checkpointing.checkpoint in a layer.",
            ConfigWarning,
            stacklevel=3,
        )
