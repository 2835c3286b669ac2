"""Names of the package, see `__init__.py`."""

from . import (
    checkpoint as checkpoint,
    checkpointing as checkpointing,
    config as config,
    data as data,
    deepspeed as deepspeed,
    errors as errors,
    forecast as forecast,
    launch as launch,
    layers as layers,
    losses as losses,
    models as models,
    optim as optim,
    partition as partition,
    schedules as schedules,
    topology as topology,
    transformer as transformer,
    weights as weights,
)
from .config import (
    TrainConfig as TrainConfig,
    add_config_arguments as add_config_arguments,
)
from .data import RepeatingLoader as RepeatingLoader
from .distributed.topology import PipelineParallelGrid as PipelineParallelGrid
from .distributed import init_distributed as init_distributed
from .engine import (
    PipelineEngine as PipelineEngine,
    UnpipelinedEngine as UnpipelinedEngine,
    initialize as initialize,
)
from .core.executor import (
    Metrics as Metrics,
    microbatch_key as microbatch_key,
)
from .tools.plan import plan as plan
from .layers import (
    LayerSpec as LayerSpec,
    PipelineModule as PipelineModule,
    TiedLayerSpec as TiedLayerSpec,
)
from .core.pipeline import (
    Pipeline as Pipeline,
    describe_pipeline as describe_pipeline,
    make_pipeline as make_pipeline,
    mesh_for as mesh_for,
)
from .tools.prove import prove as prove
from .schedules import (
    DataParallelSchedule as DataParallelSchedule,
    GPipeSchedule as GPipeSchedule,
    InferenceSchedule as InferenceSchedule,
    OneFOneBSchedule as OneFOneBSchedule,
    PipeSchedule as PipeSchedule,
    TrainSchedule as TrainSchedule,
)
from .core.state import TrainState as TrainState
from .distributed.topology import (
    PipeDataParallelTopology as PipeDataParallelTopology,
    PipeModelDataParallelTopology as PipeModelDataParallelTopology,
    ProcessTopology as ProcessTopology,
)
from .models.transformer import (
    DeepSpeedTransformerConfig as DeepSpeedTransformerConfig,
    DeepSpeedTransformerLayer as DeepSpeedTransformerLayer,
    attention as attention,
)

__version__: str
