"""Calls before the end of the program."""

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any


def before_exit(method: Callable[..., Any]) -> None:
    """Call a bound method when the program ends, if its object still exists.

    The method is called while executors still accept work, for which `atexit` is too late. Python
    has no public hook that early. `concurrent.futures` uses the same private one.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    getattr(threading, "_register_atexit", atexit.register)(call)
