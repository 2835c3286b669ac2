"""Activation checkpointing: the backward pass recomputes inner activations that are not kept."""

from jaxpipe.programs.jaxpr import REDUCED, reduced, save_reduced, save_whole

from ._checkpoint import checkpoint
from ._configure import configure, is_configured, partition_activations_in_checkpoint, settings_for
from ._kernels import KERNEL, keep_kernels
from ._settings import (
    RecomputeSettings,
    current_settings,
    is_first,
    traced_mesh,
    use_settings,
    warn_unfollowed,
)
