"""DeepSpeed-style pipeline parallelism for JAX and Flax.

A model is a list of layers, divided into stages along the `stage` axis of a mesh. A schedule such
as 1F1B is compiled into one program that sends activations and gradients between the stages.

    model = jaxpipe.PipelineModule(layers, num_stages=4, loss_fn=loss_fn)
    engine, optimizer, loader, schedule = jaxpipe.initialize(
        model=model, optimizer=optax.adamw(3e-4), config=config
    )
    loss = engine.train_batch(data_iter)

Main entry points:
    `PipelineModule`, `LayerSpec`, `TiedLayerSpec`: the model. `jaxpipe.layers` has more kinds of
        layers.
    `initialize`: creates an engine with `train_batch`, `eval_batch`, `predict`, `save_checkpoint`
        and `load_checkpoint`.
    `make_pipeline`, `describe_pipeline`: a pipeline without an engine, and a description of it.
    `plan`: estimates memory and time of a job without a GPU. `jaxpipe.forecast` lists the hardware
        that it knows.
    `jaxpipe.schedules`: 1F1B, interleaved, zero-bubble, GPipe, and the base class for your own.
    `jaxpipe.config`: the keys of a configuration. `jaxpipe.errors`: all exceptions.
    `attention`: attention for transformer blocks, by cuDNN where possible. `jaxpipe.transformer`:
        DeepSpeed's transformer layer.
    `jaxpipe.losses`: cross entropy of language models, which can be split over the stages.
    `jaxpipe.models`: Llama, Mistral, Qwen, SmolLM, GPT-2 and BERT as lists of layers.
    `jaxpipe.weights`: weights of other libraries, by tables of names.
    `jaxpipe.checkpoint`: files on disk. `jaxpipe.checkpointing`: recompute, under DeepSpeed's name.
    `jaxpipe.deepspeed`: names of DeepSpeed that have no counterpart in JAX.
    `jaxpipe launch`, on the command line: starts the processes of a job.
"""

from jaxpipe import checkpoint as checkpoint
from jaxpipe import checkpointing as checkpointing
from jaxpipe import config as config
from jaxpipe import data as data
from jaxpipe import deepspeed as deepspeed
from jaxpipe import errors as errors
from jaxpipe import forecast as forecast
from jaxpipe import launch as launch
from jaxpipe import layers as layers
from jaxpipe import losses as losses
from jaxpipe import models as models
from jaxpipe import optim as optim
from jaxpipe import partition as partition
from jaxpipe import schedules as schedules
from jaxpipe import topology as topology
from jaxpipe import transformer as transformer
from jaxpipe import weights as weights
from jaxpipe.config import TrainConfig as TrainConfig
from jaxpipe.config import add_config_arguments as add_config_arguments
from jaxpipe.data import RepeatingLoader as RepeatingLoader
from jaxpipe.deepspeed import PipelineParallelGrid as PipelineParallelGrid
from jaxpipe.distributed import init_distributed as init_distributed
from jaxpipe.engine import PipelineEngine as PipelineEngine
from jaxpipe.engine import UnpipelinedEngine as UnpipelinedEngine
from jaxpipe.engine import initialize as initialize
from jaxpipe.executor import Metrics as Metrics
from jaxpipe.executor import microbatch_key as microbatch_key
from jaxpipe.forecast import plan as plan
from jaxpipe.layers import LayerSpec as LayerSpec
from jaxpipe.layers import PipelineModule as PipelineModule
from jaxpipe.layers import TiedLayerSpec as TiedLayerSpec
from jaxpipe.pipeline import Pipeline as Pipeline
from jaxpipe.pipeline import describe_pipeline as describe_pipeline
from jaxpipe.pipeline import make_pipeline as make_pipeline
from jaxpipe.pipeline import mesh_for as mesh_for
from jaxpipe.proof import prove as prove
from jaxpipe.schedules import DataParallelSchedule as DataParallelSchedule
from jaxpipe.schedules import GPipeSchedule as GPipeSchedule
from jaxpipe.schedules import InferenceSchedule as InferenceSchedule
from jaxpipe.schedules import OneFOneBSchedule as OneFOneBSchedule
from jaxpipe.schedules import PipeSchedule as PipeSchedule
from jaxpipe.schedules import TrainSchedule as TrainSchedule
from jaxpipe.state import TrainState as TrainState
from jaxpipe.topology import PipeDataParallelTopology as PipeDataParallelTopology
from jaxpipe.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from jaxpipe.topology import ProcessTopology as ProcessTopology
from jaxpipe.transformer import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from jaxpipe.transformer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
from jaxpipe.transformer import attention as attention

__version__ = "0.1.0"

__all__ = [
    "DataParallelSchedule",
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "GPipeSchedule",
    "InferenceSchedule",
    "LayerSpec",
    "Metrics",
    "OneFOneBSchedule",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipeSchedule",
    "Pipeline",
    "PipelineEngine",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "RepeatingLoader",
    "TiedLayerSpec",
    "TrainConfig",
    "TrainSchedule",
    "TrainState",
    "UnpipelinedEngine",
    "add_config_arguments",
    "attention",
    "checkpoint",
    "checkpointing",
    "config",
    "data",
    "deepspeed",
    "describe_pipeline",
    "errors",
    "forecast",
    "init_distributed",
    "initialize",
    "launch",
    "layers",
    "make_pipeline",
    "mesh_for",
    "microbatch_key",
    "models",
    "optim",
    "partition",
    "plan",
    "prove",
    "schedules",
    "topology",
    "transformer",
    "weights",
]
