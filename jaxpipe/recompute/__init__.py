"""Activation checkpointing: the backward pass recomputes inner activations that are not kept."""

from jaxpipe.jaxpr import REDUCED as REDUCED
from jaxpipe.jaxpr import reduced as reduced
from jaxpipe.jaxpr import save_reduced as save_reduced
from jaxpipe.jaxpr import save_whole as save_whole

from ._checkpoint import checkpoint as checkpoint
from ._configure import configure as configure
from ._configure import is_configured as is_configured
from ._configure import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from ._configure import settings_for as settings_for
from ._kernels import KERNEL as KERNEL
from ._kernels import keep_kernels as keep_kernels
from ._settings import RecomputeSettings as RecomputeSettings
from ._settings import current_settings as current_settings
from ._settings import is_first as is_first
from ._settings import traced_mesh as traced_mesh
from ._settings import use_settings as use_settings
from ._settings import warn_unfollowed as warn_unfollowed

__all__ = [
    "KERNEL",
    "REDUCED",
    "RecomputeSettings",
    "checkpoint",
    "configure",
    "current_settings",
    "is_configured",
    "is_first",
    "keep_kernels",
    "partition_activations_in_checkpoint",
    "reduced",
    "save_reduced",
    "save_whole",
    "settings_for",
    "traced_mesh",
    "use_settings",
    "warn_unfollowed",
]
