"""Reporting finished steps to the launcher."""

import contextlib
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

    def touch(self, name: str = "") -> None:
        """Report that a step, or another long operation, has finished.

        A file system without room must not end the job: the launcher then shows an older name, or
        takes a job that cannot report anything for one that has stalled.

        Args:
            name: The text to write into the file.
        """
        if self._path is None:
            return
        if name:
            # A rename, so that the launcher never reads half a text.
            part = self._path.with_suffix(".part")
            with contextlib.suppress(OSError):
                part.write_bytes(name.encode(errors="backslashreplace"))
                part.replace(self._path)
                return
        with contextlib.suppress(OSError):
            self._path.touch()

    def _watch(self) -> None:
        while True:
            result, name = self._steps.get()
            # A step that fails, or whose result was donated to another one, tells nothing.
            with contextlib.suppress(Exception):
                jax.block_until_ready(result)
                self.touch(name)
