"""Storage that stops answering for a while, as a network file system does."""

import errno
import io
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = (
    *("stat", "lstat", "open", "mkdir", "rename", "replace", "unlink", "rmdir", "utime", "scandir"),
    *("listdir", "fsync"),
)


class Storage:
    """Whatever Python asks of the file system below a folder goes through here.

    Args:
        folder: The folder.
        monkeypatch: Puts this in the place of the functions of `os`.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = os.fspath(folder)
        self.calls: list[tuple[str, str]] = []
        """Names of the functions and paths, in the order of the calls."""
        self._fails: Callable[[str, str, int], int] = lambda name, path, number: 0
        self._lock = threading.RLock()
        for name in NAMES:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        monkeypatch.setattr(io, "open", self._wrapped("open", io.open))

    @contextmanager
    def failing(self, fails: Callable[[str, str, int], int]) -> Generator[None]:
        """Fail within the body: from a call's name, path and number the error's number, or 0."""
        self.calls, self._fails = [], fails
        try:
            yield
        finally:
            self._fails = lambda name, path, number: 0

    def out(self, begin: int, number: int = errno.EIO) -> Any:
        """Fail every call from a number on."""
        return self.failing(lambda name, path, call: number if call >= begin else 0)

    def _wrapped(self, name: str, true: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = _path_of(args[0]) if args else ""
            if path.startswith(self._folder):
                with self._lock:
                    found = self._fails(name, path, len(self.calls))
                    self.calls.append((name, path))
                if found:
                    raise OSError(found, os.strerror(found), path)
            return true(*args, **kwargs)

        return call


def _path_of(given: Any) -> str:
    try:
        return (
            str(Path(f"/proc/self/fd/{given}").readlink())
            if isinstance(given, int)
            else os.fsdecode(given)
        )
    except (OSError, TypeError):
        return ""
