"""`hold_signals`: delays signal handlers while an engine replaces its state."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

PRESSES = 3
"""Number of times that the same signal must arrive to be delivered immediately."""

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
# Not every system has all of them.
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


@contextlib.contextmanager
def hold_signals() -> Generator[None]:
    """Run signal handlers after the body instead of within it, if this is the main thread."""
    # A step donates the buffers of the old state before it returns the new one. A handler that
    # raises in between, as Python's own handler of Ctrl-C does, would leave the engine without any
    # state. Python runs handlers only in the main thread, so in other threads nothing is held back.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Signals that end the process without a handler still do so immediately.
    handlers = {
        number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))
    }
    received: dict[int, int] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received[number] = received.get(number, 0) + 1
        # So that a long body can be interrupted, at the cost of the state.
        if received[number] == PRESSES:
            del received[number]
            handlers[signal.Signals(number)](number, frame)

    # Each callback runs even if an earlier one raises. SIGINT's runs last, so that SIGINT cannot
    # interrupt the others.
    with contextlib.ExitStack() as after:
        for number, handler in handlers.items():
            after.callback(_deliver, number, handler, received)
            signal.signal(number, note)
        yield


def _deliver(number: int, handler: Callable[..., Any], received: dict[int, int]) -> None:
    """Restore a handler, and deliver the signal that arrived for it."""
    signal.signal(number, handler)
    # Only after the handler has been restored, because that handler must run.
    if number in received:
        signal.raise_signal(number)
