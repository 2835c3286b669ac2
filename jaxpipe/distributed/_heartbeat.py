"""Telling the launcher that steps finish."""

import os
import queue
import threading
from pathlib import Path
from typing import Any

import jax

HEARTBEAT_FILE = "JAXPIPE_HEARTBEAT_FILE"
"""The environment variable for the file whose time of change says when the last step finished.

Its text, if it has any, says which step that was and on what.
"""


class Heartbeat:
    """Touches a file whenever a step has finished on the devices, and writes into it which.

    Does nothing where the environment names none.
    """

    def __init__(self) -> None:
        path = os.environ.get(HEARTBEAT_FILE)
        self._path = None if not path else Path(path)
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._path is not None:
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def note(self, result: jax.Array, name: str = "") -> None:
        """A step was started that gives this result; `name` is what to call it."""
        if self._path is not None:
            self._steps.put((result, name))

    def touch(self) -> None:
        """Something else has finished that takes long."""
        if self._path is not None:
            self._path.touch()

    def _watch(self) -> None:
        while True:
            result, name = self._steps.get()
            jax.block_until_ready(result)
            if name and self._path is not None:
                self._path.write_text(name)
            self.touch()
