"""Loaders, shards and batches of training data."""

from ._leaves import array_fault as array_fault
from ._leaves import host_array as host_array
from ._loaders import BatchLoader as BatchLoader
from ._loaders import LoaderIterator as LoaderIterator
from ._loaders import RepeatingLoader as RepeatingLoader
from ._place import get_place as get_place
from ._place import has_place as has_place
from ._place import set_place as set_place
from ._shard import Shard as Shard
from ._shard import process_shard as process_shard
from ._stack import Batch as Batch
from ._stack import MicrobatchStack as MicrobatchStack
from ._stack import split_entry as split_entry
from ._stack import stack_microbatches as stack_microbatches
from ._stack import structures_differ as structures_differ

__all__ = [
    # For users.
    "BatchLoader",
    "RepeatingLoader",
    "Shard",
    "process_shard",
    # For other rooms.
    "Batch",
    "LoaderIterator",
    "MicrobatchStack",
    "array_fault",
    "get_place",
    "has_place",
    "host_array",
    "set_place",
    "split_entry",
    "stack_microbatches",
    "structures_differ",
]
