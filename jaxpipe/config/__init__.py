"""DeepSpeed's JSON configuration as frozen dataclasses."""

from ._args import add_config_arguments as add_config_arguments
from ._args import config_from_args as config_from_args
from ._batch import BatchSizes as BatchSizes
from ._batch import resolve_batch_sizes as resolve_batch_sizes
from ._checkpoint import CheckpointSection as CheckpointSection
from ._classes import BatchConfig as BatchConfig
from ._classes import FP16Config as FP16Config
from ._classes import TrainingConfig as TrainingConfig
from ._cli import main as main
from ._collect import Collector as Collector
from ._ema import EMASection as EMASection
from ._load import ConfigWarning as ConfigWarning
from ._load import load_config as load_config
from ._monitors import CometSection as CometSection
from ._monitors import CSVMonitorSection as CSVMonitorSection
from ._monitors import MLflowSection as MLflowSection
from ._monitors import TensorBoardSection as TensorBoardSection
from ._monitors import TrackioSection as TrackioSection
from ._monitors import WandbSection as WandbSection
from ._optimizer import OptimizerSection as OptimizerSection
from ._optimizer import SchedulerSection as SchedulerSection
from ._params import Params as Params
from ._precision import BF16Section as BF16Section
from ._precision import DataTypesSection as DataTypesSection
from ._precision import Dtype as Dtype
from ._precision import FP16Section as FP16Section
from ._profiler import FlopsProfilerSection as FlopsProfilerSection
from ._recompute import ActivationCheckpointingSection as ActivationCheckpointingSection
from ._section import without_secrets as without_secrets
from ._struct import Config as Config
from ._train import PipelineConfig as PipelineConfig
from ._train import TrainConfig as TrainConfig
from ._values import Reader as Reader
from ._values import integer_of_at_least as integer_of_at_least
from ._values import number as number
from ._values import optional as optional
from ._values import read_flag as read_flag
from ._values import unless_auto as unless_auto
from ._values import wrong_value as wrong_value
from ._zero import ZeroSection as ZeroSection

__all__ = [
    # For users.
    "ActivationCheckpointingSection",
    "BF16Section",
    "BatchConfig",
    "BatchSizes",
    "CSVMonitorSection",
    "CheckpointSection",
    "CometSection",
    "Config",
    "ConfigWarning",
    "DataTypesSection",
    "EMASection",
    "FP16Config",
    "FP16Section",
    "FlopsProfilerSection",
    "MLflowSection",
    "OptimizerSection",
    "PipelineConfig",
    "SchedulerSection",
    "TensorBoardSection",
    "TrackioSection",
    "TrainConfig",
    "TrainingConfig",
    "WandbSection",
    "ZeroSection",
    "add_config_arguments",
    "load_config",
    # For other rooms.
    "Collector",
    "Dtype",
    "Params",
    "Reader",
    "config_from_args",
    "integer_of_at_least",
    "main",
    "number",
    "optional",
    "read_flag",
    "resolve_batch_sizes",
    "unless_auto",
    "without_secrets",
    "wrong_value",
]
