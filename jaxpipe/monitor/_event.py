"""`Event`: one number of a run."""

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """One number of a run; DeepSpeed's triple.

    Attributes:
        name: Its name, such as `"Train/Samples/train_loss"`.
        value: The number.
        samples: Samples trained when it was taken.
    """

    name: str
    value: float
    samples: int


Monitor = Callable[[Sequence[Event]], None]
"""Takes the events of a step, all with the same `samples`.

Where it has a method `close`, that is called at the end.
"""
