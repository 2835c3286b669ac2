"""Letting all processes come to the same end."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.errors import CheckpointError

T = TypeVar("T")


def all_texts(text: str) -> list[str]:
    """A text of each process, in the order of their indices; all processes call."""
    if jax.process_count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([own.size]))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: own.size] = own
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def together(action: Callable[[], T], who: Sequence[int] | None = None) -> T | None:
    """Run something on some processes and raise on all if it fails on one; all processes call.

    Args:
        action: What to run; only a `CheckpointError` is shared.
        who: Indices of the processes that run it; None: all.

    Returns:
        What it returned here; None where it did not run.

    Raises:
        CheckpointError: That of the first process where it failed.
    """
    result, failure = None, ""
    own: CheckpointError | None = None
    if who is None or jax.process_index() in who:
        try:
            result = action()
        except CheckpointError as error:
            own, failure = error, str(error)
    failures = [(process, text) for process, text in enumerate(all_texts(failure)) if text]
    if own is not None:
        raise own
    if failures:
        raise CheckpointError(f"process {failures[0][0]} failed: {failures[0][1]}")
    return result
