"""Batches on their way to the engine."""

from ._loaders import BatchLoader as BatchLoader
from ._loaders import RepeatingLoader as RepeatingLoader
from ._stack import stack_microbatches as stack_microbatches

__all__ = ["BatchLoader", "RepeatingLoader", "stack_microbatches"]
