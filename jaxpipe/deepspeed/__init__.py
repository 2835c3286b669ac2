"""DeepSpeed's names without a counterpart in JAX, for programs that are ported from it.

No other room needs them.

Some stay where the library needs them, and the first two are named here too:
`PipelineParallelGrid`, the type of `engine.grid`; the struct classes of DeepSpeed 0.3, which
`load_config` reads; and methods of `PipelineEngine` and `PipelineModule` that are refused, with
what takes their place.
"""

from jaxpipe.config import BatchConfig as BatchConfig
from jaxpipe.config import Config as Config
from jaxpipe.config import FP16Config as FP16Config
from jaxpipe.config import TrainingConfig as TrainingConfig
from jaxpipe.topology import PipelineParallelGrid as PipelineParallelGrid

from ._checkpointing import CheckpointFunction as CheckpointFunction
from ._checkpointing import non_reentrant_checkpoint as non_reentrant_checkpoint
from ._checkpointing import reset as reset
from ._checkpointing import set_num_layers as set_num_layers
from ._rng_tracker import CudaRNGStatesTracker as CudaRNGStatesTracker
from ._rng_tracker import RNGState as RNGState
from ._rng_tracker import get_cuda_rng_tracker as get_cuda_rng_tracker
from ._rng_tracker import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from ._rng_tracker import model_parallel_reconfigure_tp_seed as model_parallel_reconfigure_tp_seed

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
