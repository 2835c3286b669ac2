"""DeepSpeed's JSON configuration as frozen dataclasses."""

# pyright: reportUnusedImport=false

from ._args import add_config_arguments, config_from_args
from ._batch import BatchSizes, resolve_batch_sizes
from ._checkpoint import CheckpointSection
from ._cli import main
from ._collect import Collector
from ._ema import EMASection
from ._load import ConfigWarning, load_config
from ._monitors import (
    CometSection,
    CSVMonitorSection,
    MLflowSection,
    TensorBoardSection,
    TrackioSection,
    WandbSection,
)
from ._optimizer import OptimizerSection, SchedulerSection
from ._other_keys import Refusal, Unused
from ._params import Params
from ._precision import BF16Section, DataTypesSection, Dtype, FP16Section
from ._profiler import FlopsProfilerSection
from ._recompute import ActivationCheckpointingSection
from ._section import (
    Section,
    checked_key,
    idle_keys,
    join,
    key_names,
    missing_key,
    read_section,
    read_whole,
    required,
    setting,
    subsection,
    unknown_key,
    without_secrets,
)
from ._train import PipelineConfig, TrainConfig
from ._values import (
    Reader,
    integer_of_at_least,
    list_of,
    number,
    number_of_at_least,
    one_of_exactly,
    optional,
    read_flag,
    read_object,
    unless_auto,
    wrong_value,
)
from ._zero import ZeroSection

__all__ = [
    "ActivationCheckpointingSection",
    "BF16Section",
    "BatchSizes",
    "CSVMonitorSection",
    "CheckpointSection",
    "CometSection",
    "ConfigWarning",
    "DataTypesSection",
    "EMASection",
    "FP16Section",
    "FlopsProfilerSection",
    "MLflowSection",
    "OptimizerSection",
    "PipelineConfig",
    "SchedulerSection",
    "TensorBoardSection",
    "TrackioSection",
    "TrainConfig",
    "WandbSection",
    "ZeroSection",
    "add_config_arguments",
    "load_config",
]
