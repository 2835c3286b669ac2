"""`Event`: one value of a metric."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """One value of a metric, in the form of DeepSpeed's triple.

    Attributes:
        name: Name of the metric, such as `"Train/Samples/train_loss"`.
        value: The value.
        samples: Number of samples trained so far.
    """

    name: str
    value: float
    samples: int


Monitor = Callable[[Sequence[Event]], None]
"""A function of the events of one step, which all have the same `samples`.

If it has a method `close`, that method is called at the end.
"""
