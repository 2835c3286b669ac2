"""DeepSpeed's JSON configuration as frozen dataclasses."""

from ._batch import BatchSizes as BatchSizes
from ._batch import resolve_batch_sizes as resolve_batch_sizes
from ._load import load_config as load_config
from ._train import PipelineConfig as PipelineConfig
from ._train import TrainConfig as TrainConfig

__all__ = ["BatchSizes", "PipelineConfig", "TrainConfig", "load_config", "resolve_batch_sizes"]
