"""What the end of the program waits for."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any


def before_exit(method: Callable[..., Any]) -> None:
    """Call a bound method when the program ends, if its object still exists then.

    It is called while executors still take work, which `atexit` is too late for. Python has no
    public hook that early; `concurrent.futures` uses the same one.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    getattr(threading, "_register_atexit", atexit.register)(call)
