"""Raising the error of one process in all processes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jaxpipe.errors import JaxpipeError

from ._gather import gather_texts

T = TypeVar("T")


def run_on_all(action: Callable[[], T], who: Sequence[int] | None = None) -> T | None:
    """Run a function on some processes (None: all), and raise on all if it fails on one.

    All processes must call it. Returns None on processes that did not run it. If it failed on
    another process, raises a `JaxpipeError` of the same class, with the index of the first process
    that failed and its message.
    """
    result = None
    failure = ""
    own: Exception | None = None
    if who is None or jax.process_index() in who:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  # raised again below, on all processes
            own = error
            failure = failure_of(error)
    if own is not None and not jax.distributed.is_initialized():
        # There is only one process. Counting processes would initialise JAX's devices, and there
        # may be none.
        raise own
    # A failure of one process must not leave the others waiting.
    if jax.process_count() > 1:
        raise_on_all(own, gather_texts(failure))
    elif own is not None:
        raise own
    return result


def failure_of(error: Exception) -> str:
    """Format an error for `raise_on_all`: the name of its class, a line break and its message."""
    try:
        text = str(error)
    # A faulty class of the user: the other processes must still be informed.
    except Exception:  # noqa: BLE001
        text = "(an error whose text cannot be made)"
    return f"{type(error).__name__}\n{text}"


def raise_on_all(own: Exception | None, failures: Sequence[str]) -> None:
    """Raise this process's error, or one that reports the first of the others.

    `failures` has a text from `failure_of` for each process, empty if it did not fail.
    """
    if own is not None:
        raise own
    for process, failure in enumerate(failures):
        if failure:
            kind, _, text = failure.partition("\n")
            known = {cls.__name__: cls for cls in JaxpipeError.__subclasses__()}
            raise known.get(kind, JaxpipeError)(f"process {process} failed with {kind}: {text}")
