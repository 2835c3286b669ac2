"""Calls before the end of the program, and its exit status if they fail."""

import atexit
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any


def before_exit(method: Callable[..., Any], work: str) -> None:
    """Call a bound method when the program ends, if its object still exists.

    If the user interrupts it, the program fails and says that it was interrupted while `work`.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is None:
            return
        try:
            found()
        except KeyboardInterrupt:
            error = KeyboardInterrupt(f"the program was interrupted while {work}")
            fail_at_exit(error)
            raise error from None  # so that no thread is waited for

    # While executors still accept work, for which `atexit` is too late. Python has no public hook
    # that early. `concurrent.futures` uses the same private one.
    getattr(threading, "_register_atexit", atexit.register)(call)


def fail_at_exit(error: BaseException) -> None:
    """Let the interpreter, which is about to exit, do so with status 120, and print the error."""
    # Without the traceback that Python would show.
    sys.stderr.write("".join(traceback.format_exception_only(error)))
    show = sys.unraisablehook
    sys.unraisablehook = lambda found: None if found.exc_value is error else show(found)
    sys.stdout = _FailingAtTheEnd(sys.stdout, error)


class _FailingAtTheEnd:
    """A stream that cannot be flushed when the interpreter exits, which makes the status 120."""

    def __init__(self, stream: Any, error: BaseException) -> None:
        self._stream = stream
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream, except at exit."""
        self._stream.flush()
        if sys.is_finalizing():
            raise self._error
