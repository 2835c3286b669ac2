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
    """Touches a file and writes a step's name when the step has finished on the devices."""

    def __init__(self) -> None:
        path = os.environ.get(HEARTBEAT_FILE)
        # Without a file nothing is reported.
        self._path = None if not path else Path(path)
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        if self._path is not None:
            threading.Thread(target=self._watch, daemon=True, name="heartbeat").start()

    def note(self, result: jax.Array, name: str = "") -> None:
        """Report a step, under this name, once `result`, one of its results, is complete."""
        if self._path is not None:
            self._steps.put((result, name))

    def touch(self, name: str = "") -> None:
        """Report that a step, or another long operation, has finished, under this name."""
        if self._path is None:
            return
        # A file system without room must not end the job: the launcher then shows an older name, or
        # takes a job that cannot report anything for one that has stalled.
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
