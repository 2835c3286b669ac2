"""DeepSpeed names without a JAX counterpart, for programs ported from DeepSpeed.

No other package of jaxpipe uses them.

Some other DeepSpeed names are defined where the library needs them. Of these, this package
re-exports `PipelineParallelGrid`, the type of `engine.grid`, and the struct classes of DeepSpeed
0.3, which `load_config` reads. Methods of `PipelineEngine` and `PipelineModule` that are not
supported raise an error that names the replacement.
"""

from jaxpipe.config import BatchConfig, Config, FP16Config, TrainingConfig
from jaxpipe.topology import PipelineParallelGrid

from ._checkpointing import CheckpointFunction, non_reentrant_checkpoint, reset, set_num_layers
from ._rng_tracker import (
    CudaRNGStatesTracker,
    RNGState,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)

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
