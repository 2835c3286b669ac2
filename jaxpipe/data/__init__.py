"""Batches on their way to the engine."""

from ._loaders import BatchLoader as BatchLoader
from ._loaders import RepeatingLoader as RepeatingLoader
from ._shard import Shard as Shard
from ._shard import process_shard as process_shard
from ._stack import stack_microbatches as stack_microbatches

__all__ = [
    "BatchLoader",
    "RepeatingLoader",
    "Shard",
    "process_shard",
    "stack_microbatches",
]
