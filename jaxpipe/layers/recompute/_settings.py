"""Settings of recompute.

They say how kept inputs are stored. A call of `checkpoint` finds its settings here.
"""

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from jax.sharding import Mesh

from jaxpipe._util.warn import warn
from jaxpipe.config import ConfigWarning


@dataclass(frozen=True)
class RecomputeSettings:
    """How `checkpoint` stores inputs for the backward pass.

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
    """The settings in force in one context, and whether a call of `checkpoint` has used them.

    `mesh` is the one that a pipeline traces its programs for; None outside a pipeline. `notes` were
    already given about the layers traced here.
    """

    settings: RecomputeSettings = RecomputeSettings()
    is_followed: bool = False
    mesh: Mesh | None = None
    notes: set[str] = field(default_factory=set[str])


_SCOPE: ContextVar[Scope] = ContextVar("jaxpipe_recompute_scope")
"""The settings in force in the current context.

DeepSpeed's `checkpoint(function, *args)` has no argument for settings and is called deep inside the
user's own layers, so it must find them itself. A context variable is the simplest way: it is
separate per thread and task, and tracing a program under `use_settings` leaves nothing behind. The
pipeline that traces receives the settings as arguments.
"""


def current_settings() -> RecomputeSettings:
    """The settings that `checkpoint` uses in the current context.

    They come from the innermost `use_settings`, or from `configure`.
    """
    return _SCOPE.get(Scope()).settings


def follow_settings() -> RecomputeSettings:
    """The settings in force, for a caller that follows them."""
    scope = _SCOPE.get(Scope())
    scope.is_followed = True
    return scope.settings


def set_settings(settings: RecomputeSettings) -> None:
    """Set the settings of this thread, until the end of the surrounding `use_settings` if any."""
    _SCOPE.set(dataclasses.replace(_SCOPE.get(Scope()), settings=settings, is_followed=False))


def traced_mesh() -> Mesh | None:
    """The mesh that a pipeline traces its programs for, unchanged; None outside a pipeline."""
    # Not the surrounding mesh: variables are traced without one, and an abstract mesh has no
    # devices.
    return _SCOPE.get(Scope()).mesh


def is_first(note: str) -> bool:
    """True if a note about a layer is new in this trace of a model; always outside a pipeline."""
    notes = _SCOPE.get(Scope()).notes
    is_new = note not in notes
    notes.add(note)
    return is_new


@contextmanager
def use_settings(settings: RecomputeSettings, mesh: Mesh | None = None) -> Generator[Scope]:
    """Use settings inside a `with` block, and restore the previous ones after it.

    Args:
        settings: The settings that `checkpoint` uses inside the block. A program that is traced
            there keeps them permanently.
        mesh: The mesh that the program will run on; None for JAX's default device.

    Yields:
        The scope, which records whether anything used the settings.
    """
    scope = Scope(settings, mesh=mesh)
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


def warn_unfollowed(settings: RecomputeSettings) -> None:
    """Warn of settings in a configuration that nothing in a whole traced model used."""
    keys = {
        "partition_activations": settings.partition_activations,
        "cpu_checkpointing": settings.checkpoint_in_cpu,
        "profile": settings.profile,
    }
    asked = [f"activation_checkpointing.{key}" for key, value in keys.items() if value]
    # Those of `configure` may be meant for another model.
    if asked and not settings.configured:
        warn(
            f"No effect: {' and '.join(asked)}, because no layer is recomputed. Set "
            "pipeline.activation_checkpoint_interval to the number of layers in a recomputed "
            "group, mark layers with LayerSpec(...).remat(), or call "
            "jaxpipe.checkpointing.checkpoint in a layer.",
            ConfigWarning,
        )
