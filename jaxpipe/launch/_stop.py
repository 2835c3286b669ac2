"""Requests to end the job: signals, and messages from another launcher."""

import select
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from jaxpipe.errors import LaunchError

from ._variables import receive_line

# mpirun ends its processes immediately at SIGTERM, but forwards SIGUSR1.
_AS_TERM = (signal.SIGHUP, signal.SIGUSR1)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *_AS_TERM)
_ORPHAN_GRACE_S = 5.0


@dataclass(frozen=True)
class Stop:
    """A request to end: the signal `number`, and a sentence with the reason."""

    number: int
    # Time for the processes to end; None is the time in the limits.
    grace_s: float | None
    reason: str
    # Ends the wait for an earlier request.
    is_urgent: bool = False
    # From a launcher on another node, which reports the reason. The exit code here is then 0,
    # because any other code would make a scheduler end the other nodes too early.
    is_remote: bool = False


class StopRequests:
    """A context manager that collects signals and the requests of another launcher.

    SIGHUP and SIGUSR1 count as SIGTERM. A scheduler may send SIGTERM more than once, and repeated
    ones have no effect. A repeated interrupt ends the processes immediately. `control` is how
    another launcher sends requests: `"stdin"`, which is closed when that launcher is gone, or
    `"signal"`, which is SIGUSR1. None if there is no other launcher.
    """

    def __init__(self, control: str | None = None) -> None:
        self._is_signalled = control == "signal"
        self._control = sys.stdin.fileno() if control == "stdin" else None
        self._received: list[Stop] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequests":
        for number in _SIGNALS:
            # SIGHUP stays ignored if it already is, for example under nohup.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def received(self) -> tuple[Stop, ...]:
        """All requests so far, in order."""
        self._read_control()
        return tuple(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        passed_on = signal.SIGTERM if number in _AS_TERM else number
        reason = f"Got {signal.Signals(number).name}."
        is_remote = self._is_signalled and number == signal.SIGUSR1
        self._received.append(
            Stop(passed_on, None, reason, is_urgent=number == signal.SIGINT, is_remote=is_remote)
        )

    def _read_control(self) -> None:
        while self._control is not None and select.select([self._control], [], [], 0)[0]:
            try:
                _, number, grace_s = receive_line(self._control).split()
            except LaunchError:
                self._control = None
                reason = "The launcher that started this node is gone."
                self._received.append(Stop(signal.SIGTERM, _ORPHAN_GRACE_S, reason, is_urgent=True))
            else:
                reason = "The launcher that started this node ends it."
                self._received.append(Stop(int(number), float(grace_s), reason, is_remote=True))
