"""DeepSpeed names without a JAX counterpart, for programs ported from DeepSpeed.

No other package of jaxpipe uses them.

Some other DeepSpeed names are defined where the library needs them. Of these, this package
re-exports `PipelineParallelGrid`, the type of `engine.grid`, and the struct classes of DeepSpeed
0.3, which `load_config` reads. Methods of `PipelineEngine` and `PipelineModule` that are not
supported raise an error that names the replacement.
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
