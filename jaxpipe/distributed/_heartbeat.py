"""Reporting finished steps to the launcher."""

import os
import queue
import threading
from pathlib import Path
from typing import Any

import jax

HEARTBEAT_FILE = "JAXPIPE_HEARTBEAT_FILE"
"""The environment variable for the heartbeat file.

The modification time of the file is when the last step finished. Its text, if it has any, names
that step and its data.
"""


class Heartbeat:
    """Touches a file and writes the name of the step whenever a step has finished on the devices.

    It does nothing if the environment names no file.
    """

    def __init__(self) -> None:
        path = os.environ.get(HEARTBEAT_FILE)
        self._path = None if not path else Path(path)
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._path is not None:
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def note(self, result: jax.Array, name: str = "") -> None:
        """Watch a step that was started.

        Args:
            result: A result of the step, which is complete when the step has finished.
            name: The text to write into the file when the step has finished.
        """
        if self._path is not None:
            self._steps.put((result, name))

    def touch(self) -> None:
        """Report that another long operation has finished."""
        if self._path is not None:
            self._path.touch()

    def _watch(self) -> None:
        while True:
            result, name = self._steps.get()
            jax.block_until_ready(result)
            if name and self._path is not None:
                # A rename, so that the launcher never reads half a text.
                part = self._path.with_suffix(".part")
                part.write_text(name)
                part.replace(self._path)
            else:
                self.touch()
