"""Recompute under DeepSpeed's names, and DeepSpeed's tracker of random streams.

Here *checkpointing* means DeepSpeed's activation checkpointing: the inner activations of a function
are recomputed in the backward pass instead of stored. For files on disk see `jaxpipe.checkpoint`.
"""

from jaxpipe.engine.deepspeed import CheckpointFunction as CheckpointFunction
from jaxpipe.engine.deepspeed import CudaRNGStatesTracker as CudaRNGStatesTracker
from jaxpipe.engine.deepspeed import RNGState as RNGState
from jaxpipe.engine.deepspeed import get_cuda_rng_tracker as get_cuda_rng_tracker
from jaxpipe.engine.deepspeed import (
    model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed,
)
from jaxpipe.engine.deepspeed import (
    model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed,
)
from jaxpipe.engine.deepspeed import non_reentrant_checkpoint as non_reentrant_checkpoint
from jaxpipe.engine.deepspeed import reset as reset
from jaxpipe.engine.deepspeed import set_num_layers as set_num_layers
from jaxpipe.layers.recompute import REDUCED as REDUCED
from jaxpipe.layers.recompute import RecomputeSettings as RecomputeSettings
from jaxpipe.layers.recompute import checkpoint as checkpoint
from jaxpipe.layers.recompute import configure as configure
from jaxpipe.layers.recompute import current_settings as current_settings
from jaxpipe.layers.recompute import is_configured as is_configured
from jaxpipe.layers.recompute import keep_kernels as keep_kernels
from jaxpipe.layers.recompute import (
    partition_activations_in_checkpoint as partition_activations_in_checkpoint,
)
from jaxpipe.layers.recompute import reduced as reduced
from jaxpipe.layers.recompute import save_reduced as save_reduced
from jaxpipe.layers.recompute import save_whole as save_whole
from jaxpipe.layers.recompute import settings_for as settings_for
from jaxpipe.layers.recompute import use_settings as use_settings

__all__ = [
    "REDUCED",
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "RNGState",
    "RecomputeSettings",
    "checkpoint",
    "configure",
    "current_settings",
    "get_cuda_rng_tracker",
    "is_configured",
    "keep_kernels",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reduced",
    "reset",
    "save_reduced",
    "save_whole",
    "set_num_layers",
    "settings_for",
    "use_settings",
]
