"""Activation checkpointing: inner activations computed again in the backward pass instead of kept."""

from ._checkpoint import CheckpointFunction as CheckpointFunction
from ._checkpoint import checkpoint as checkpoint
from ._checkpoint import non_reentrant_checkpoint as non_reentrant_checkpoint
from ._configure import configure as configure
from ._configure import is_configured as is_configured
from ._configure import partition_activations_in_checkpoint as partition_activations_in_checkpoint
from ._configure import reset as reset
from ._configure import set_num_layers as set_num_layers
from ._configure import settings_for as settings_for
from ._rng_tracker import CudaRNGStatesTracker as CudaRNGStatesTracker
from ._rng_tracker import RNGState as RNGState
from ._rng_tracker import get_cuda_rng_tracker as get_cuda_rng_tracker
from ._rng_tracker import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from ._rng_tracker import model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed
from ._settings import RecomputeSettings as RecomputeSettings
from ._settings import current_settings as current_settings
from ._settings import use_settings as use_settings
from ._settings import warn_unfollowed as warn_unfollowed

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "RNGState",
    "RecomputeSettings",
    "checkpoint",
    "configure",
    "current_settings",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "settings_for",
    "use_settings",
    "warn_unfollowed",
]
