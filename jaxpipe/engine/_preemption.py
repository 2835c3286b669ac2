"""Noticing that the process is asked to end."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType

import jax
from jax.experimental import multihost_utils

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
        self._received: int | None = None
        for each in signals:
            signal.signal(each, self._note)

    def reached(self, step: int) -> bool:
        """Whether to end after this step; all processes get the same answer."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """What shells report of a process that the signal ended."""
        return 128 + (self._received or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = number
