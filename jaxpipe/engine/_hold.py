"""`hold_signals`: handlers wait while an engine exchanges its state."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

PRESSES = 3
"""Number of times the same signal must come to be let through at once."""

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
# Not every system has all.
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@contextlib.contextmanager
def hold_signals() -> Generator[None]:
    """Let handlers of signals run after the body, not within it.

    A step takes the buffers of the old state before it gives the new one. A handler that raises in
    between, as Python's own does for Ctrl-C, would leave an engine without either. Signals that
    came are delivered at the end, before the next line of the caller; signals that end the process
    without a handler do so at once. The third of a kind is let through, so that a body that takes
    long can be broken off, at the price of the state.

    Python runs handlers in the main thread alone, so in any other nothing is held back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))
    }
    received: dict[int, int] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received[number] = received.get(number, 0) + 1
        if received[number] == PRESSES:
            del received[number]
            handlers[signal.Signals(number)](number, frame)

    # Each callback runs, whatever those before it raise; SIGINT's runs last, until then it can
    # break nothing off.
    with contextlib.ExitStack() as after:
        for number, handler in handlers.items():
            after.callback(_deliver, number, handler, received)
            signal.signal(number, note)
        yield


def _deliver(number: int, handler: Callable[..., Any], received: dict[int, int]) -> None:
    """Restore a handler, and deliver the signal that came for it."""
    signal.signal(number, handler)
    # Only now: it is the restored handler that is to run.
    if number in received:
        signal.raise_signal(number)
