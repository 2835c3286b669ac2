"""Loaders, shards and batches of training data."""

from ._leaves import array_fault, host_array
from ._loaders import BatchLoader, LoaderIterator, RepeatingLoader
from ._place import get_place, has_place, set_place
from ._shard import Shard, process_shard
from ._stack import Batch, MicrobatchStack, split_entry, stack_microbatches, structures_differ

__all__ = [
    "BatchLoader",
    "RepeatingLoader",
    "Shard",
    "process_shard",
]
