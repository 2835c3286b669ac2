"""The folder of a run that a monitor writes its files to, on a file system or on a store."""

import contextlib
import time
from pathlib import Path

from jaxpipe._paths import any_path
from jaxpipe._stores import StorePath, staging_folder, upload
from jaxpipe.errors import ConfigError

_UPLOAD_EVERY_S = 10.0
"""Seconds between two uploads: a store takes a file as a whole, however little of it is new."""


class RunFolder:
    """A folder of files that grow.

    Of a folder on a store the files grow in the temporary directory, and those that have changed
    are uploaded every ten seconds and at the end.

    Args:
        output_path: Where the run's folder is made; empty: the working directory.
        job_name: Its name.
        goes_on: Whether files of an earlier run are written on.

    Raises:
        OSError: The folder cannot be made, or the store does not answer.

    Attributes:
        path: Where to write.
    """

    def __init__(self, output_path: str, job_name: str, *, goes_on: bool = False) -> None:
        folder = any_path(output_path or ".", "output_path", ConfigError) / job_name
        self._stack = contextlib.ExitStack()
        self._target: StorePath | None = None
        self._sizes: dict[str, int] = {}
        self._last = time.monotonic()
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder
            return
        self._target, self.path = folder, self._stack.enter_context(staging_folder())
        there = folder.iterdir()  # also where nothing is to be read: a wrong bucket is told now
        for each in there if goes_on else []:
            if not each.is_dir():
                (self.path / each.name).write_bytes(each.read_bytes())
                self._sizes[each.name] = (self.path / each.name).stat().st_size

    def upload_in_time(self) -> None:
        """Bring the store up to date, if the last time was long enough ago."""
        if time.monotonic() >= self._last + _UPLOAD_EVERY_S:
            self.upload()

    def upload(self) -> None:
        """Bring the store up to date."""
        if self._target is None:
            return
        for file in self.path.iterdir():
            size = file.stat().st_size
            if not file.name.startswith(".") and self._sizes.get(file.name) != size:
                upload(file, self._target / file.name)
                self._sizes[file.name] = size
        self._last = time.monotonic()

    def close(self) -> None:
        """Bring the store up to date and remove what was kept for it."""
        with self._stack:
            self.upload()
