"""Raising the error of one process in all processes."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jaxpipe.errors import JaxpipeError

from ._gather import gather_texts

T = TypeVar("T")


def run_on_all(action: Callable[[], T], who: Sequence[int] | None = None) -> T | None:
    """Run a function on some processes, and raise on all processes if it fails on one.

    All processes must call it. A failure of one process then does not leave the others waiting.

    Args:
        action: The function to run.
        who: Indices of the processes that run it. None for all processes.

    Returns:
        The result of the function, or None on processes that did not run it.

    Raises:
        Exception: The error of the function on this process. If it failed on another process, a
            `JaxpipeError` of the same class, with the index of the first process that failed and
            its message.
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
    if jax.process_count() > 1:
        raise_on_all(own, gather_texts(failure))
    elif own is not None:
        raise own
    return result


def failure_of(error: Exception) -> str:
    """Format an error for `raise_on_all`.

    Args:
        error: The error.

    Returns:
        The name of its class, a line break and its message.
    """
    try:
        text = str(error)
    # A faulty class of the user: the other processes must still be informed.
    except Exception:  # noqa: BLE001
        text = "(an error whose text cannot be made)"
    return f"{type(error).__name__}\n{text}"


def raise_on_all(own: Exception | None, failures: Sequence[str]) -> None:
    """Raise an error if any process failed.

    Args:
        own: The error of this process, or None.
        failures: For each process its error from `failure_of`, or an empty string if it did not
            fail.

    Raises:
        Exception: The error of this process, or one that reports the first error of the others.
    """
    if own is not None:
        raise own
    for process, failure in enumerate(failures):
        if failure:
            kind, _, text = failure.partition("\n")
            known = {cls.__name__: cls for cls in JaxpipeError.__subclasses__()}
            raise known.get(kind, JaxpipeError)(f"process {process} failed with {kind}: {text}")
