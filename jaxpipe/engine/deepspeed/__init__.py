"""DeepSpeed names without a JAX counterpart, for programs ported from DeepSpeed.

No other package of jaxpipe uses them.

`PipelineParallelGrid`, the type of `engine.grid`, is defined where the library needs it. The struct
classes are those of DeepSpeed 0.3; `initialize` and `load_config` read a `TrainingConfig`. Methods
of `PipelineEngine` and `PipelineModule` that are not supported raise an error that names the
replacement.
"""

from jaxpipe.distributed.topology import PipelineParallelGrid

from ._checkpointing import CheckpointFunction, non_reentrant_checkpoint, reset, set_num_layers
from ._classes import BatchConfig, FP16Config, TrainingConfig
from ._rng_tracker import (
    CudaRNGStatesTracker,
    RNGState,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from ._struct import Config

__all__ = [
    "BatchConfig",
    "CheckpointFunction",
    "Config",
    "CudaRNGStatesTracker",
    "FP16Config",
    "PipelineParallelGrid",
    "RNGState",
    "TrainingConfig",
    "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "reset",
    "set_num_layers",
]
