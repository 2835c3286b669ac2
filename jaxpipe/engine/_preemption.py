"""Noticing that the process is asked to end."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType

from jaxpipe.distributed import gather_numbers
from jaxpipe.errors import CheckpointError


class PreemptionWatch:
    """Catches signals that announce the end, and says so when asked.

    Args:
        signals: Which ones.

    Raises:
        CheckpointError: It is not made in the main thread, which alone may catch signals.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError(
                "save_on_preemption must be called in the main thread, which alone may catch signals, but got thread="
                f"{threading.current_thread().name!r}. Call it where the program begins."
            )
        self._received = 0
        for each in signals:
            signal.signal(each, self._note)

    def exit_code(self) -> int | None:
        """What shells report of a process that the signal ended, if one came to any process; all processes call.

        Returns:
            The same on all processes; None: no signal came.
        """
        received = int(gather_numbers([self._received]).max())
        return 128 + received if received else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number
