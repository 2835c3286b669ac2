"""An object store on this disk, for several processes: `disk://` and an absolute path.

Its requests can be counted, made to fail, and be the last thing that a process does.
"""

import contextlib
import datetime
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

_UPLOAD = ".upload-"


class DiskStore(AbstractFileSystem):
    """Objects are files, written by a rename; a folder without one is not there."""

    protocol = "disk"
    number: ClassVar[int] = 0
    calls: ClassVar[list[tuple[str, str]]] = []
    hook: ClassVar[Callable[[int, str, str, bool], None] | None] = None
    """Called with a request's number, name and path, before it is done and after that."""
    _guard: ClassVar[Any] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("disk://").rstrip("/")

    @classmethod
    @contextlib.contextmanager
    def hooked(cls, hook: Callable[[int, str, str, bool], None] | None) -> Generator[None]:
        """Call a function at each request within the body, which are counted from 0."""
        cls.number, cls.calls, cls.hook = 0, [], hook
        try:
            yield
        finally:
            cls.hook = None

    @contextlib.contextmanager
    def _request(self, name: str, path: str) -> Generator[Path]:
        hook = type(self).hook
        with self._guard:
            number = self.number
            type(self).number += 1
            self.calls.append((name, path))
        if hook is not None:
            hook(number, name, path, False)
        try:
            yield Path(self._strip_protocol(path))
        finally:
            if hook is not None:
                hook(number, name, path, True)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        with self._request("info", path) as file:
            return _info(file)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        with self._request("ls", path) as folder:
            found = [_info(folder)] if folder.is_file() else _listed(folder)
        return found if detail else [each["name"] for each in found]

    def find(self, path: str, *args: Any, detail: bool = False, **kwargs: Any) -> Any:
        with self._request("find", path) as folder:
            found = {}
            for file in _below(folder):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found[str(file)] = _info(file)
        return found if detail else list(found)

    def modified(self, path: str) -> datetime.datetime:
        with self._request("modified", path) as file:
            return datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        with self._request("get", path) as file:
            return file.read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self._request("put", path) as file:
            _put(file, lambda partial: partial.write_bytes(value))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
        with self._request("put", rpath) as file:
            _put(file, lambda partial: shutil.copyfile(lpath, partial))

    def rm_file(self, path: str) -> None:
        with self._request("delete", path) as file:
            file.unlink()
            for folder in file.parents:
                try:
                    folder.rmdir()
                except OSError:
                    break


def _info(file: Path) -> dict[str, Any]:
    if file.is_file():
        return {"name": str(file), "type": "file", "size": file.stat().st_size}
    if any(True for _ in _below(file)):
        return {"name": str(file), "type": "directory", "size": 0}
    raise FileNotFoundError(str(file))


def _listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in sorted(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found += [] if each.name.startswith(_UPLOAD) else [_info(each)]
    if not found:
        raise FileNotFoundError(str(folder))
    return found


def _below(folder: Path) -> Generator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names if not name.startswith(_UPLOAD))


def _put(file: Path, write: Callable[[Path], object]) -> None:
    while True:
        partial = file.parent / f"{_UPLOAD}{secrets.token_hex(8)}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            partial.replace(file)
        # The last object of its folder was deleted meanwhile, and the folder with it.
        except (FileNotFoundError, FileExistsError):
            continue
        return


fsspec.register_implementation("disk", DiskStore, clobber=True)
