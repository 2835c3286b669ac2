"""The folder to which a monitor writes the files of a run, on a file system or on a store."""

import contextlib
import time
from pathlib import Path

from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import StorePath, staging_folder, upload
from jaxpipe.errors import ConfigError

_UPLOAD_EVERY_S = 10.0
"""Seconds between two uploads. A store accepts only whole files, however little of one is new."""


class RunFolder:
    """A run's folder of growing files, in `output_path` (if empty, the working directory).

    If the folder is on a store, the files grow in the temporary directory, at `path`. Files that
    have changed are uploaded with new values, at most every ten seconds, and at the end. Two runs
    that write to one folder on a store overwrite each other's files. With `goes_on` the files of an
    earlier run grow further.
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
        self._target = folder
        self.path = self._stack.enter_context(staging_folder())
        there = folder.iterdir()  # always, so that a wrong bucket raises an error now
        for each in there if goes_on else []:
            if not each.is_dir():
                (self.path / each.name).write_bytes(each.read_bytes())
                self._sizes[each.name] = (self.path / each.name).stat().st_size

    def upload_in_time(self) -> None:
        """Upload changed files, if the last upload was long enough ago."""
        if time.monotonic() >= self._last + _UPLOAD_EVERY_S:
            self.upload()

    def upload(self) -> None:
        """Upload changed files to the store, if there is one."""
        if self._target is None:
            return
        for file in self.path.iterdir():
            size = file.stat().st_size
            if not file.name.startswith(".") and self._sizes.get(file.name) != size:
                upload(file, self._target / file.name)
                self._sizes[file.name] = size
        self._last = time.monotonic()

    def close(self) -> None:
        """Upload changed files and remove their temporary copies."""
        with self._stack:
            self.upload()
