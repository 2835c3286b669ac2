"""Letting all processes come to the same end."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from jaxpipe.errors import JaxpipeError

from ._gather import gather_texts

T = TypeVar("T")


def run_on_all(action: Callable[[], T], who: Sequence[int] | None = None) -> T | None:
    """Run something on some processes and raise on all if it fails on one; all processes call.

    So one process's mistake does not leave the others waiting for it.

    Args:
        action: What to run.
        who: Indices of the processes that run it; None: all.

    Returns:
        What it returned here; None where it did not run.

    Raises:
        Exception: What it raised here; where it failed elsewhere the same kind of `JaxpipeError`,
            with the index of the first process that failed and its message.
    """
    result, failure = None, ""
    own: Exception | None = None
    if who is None or jax.process_index() in who:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  # raised again below, when all processes know
            own, failure = error, failure_of(error)
    if own is not None and not jax.distributed.is_initialized():
        # Alone; and to count processes is to ask JAX for its devices, of which it may have none.
        raise own
    if jax.process_count() > 1:
        raise_on_all(own, gather_texts(failure))
    elif own is not None:
        raise own
    return result


def failure_of(error: Exception) -> str:
    """An error as `raise_on_all` takes it."""
    try:
        text = str(error)
    # A class of the user's: the others must hear of it all the same.
    except Exception:  # noqa: BLE001
        text = "(an error whose text cannot be made)"
    return f"{type(error).__name__}\n{text}"


def raise_on_all(own: Exception | None, failures: Sequence[str]) -> None:
    """Raise if some process failed.

    Args:
        own: What this process raised.
        failures: For each process the name of the error's class, a line break and what it says;
            empty where it did not fail.

    Raises:
        Exception: This process's own, or one that tells of the first of the others.
    """
    if own is not None:
        raise own
    for process, failure in enumerate(failures):
        if failure:
            kind, _, text = failure.partition("\n")
            known = {cls.__name__: cls for cls in JaxpipeError.__subclasses__()}
            raise known.get(kind, JaxpipeError)(f"process {process} failed with {kind}: {text}")
