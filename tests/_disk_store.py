"""An object store on this disk, for several processes: `disk://` and an absolute path.

Its requests can be counted, made to fail, and be the last thing that a process does.
"""

import contextlib
import datetime
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, ClassVar

import obstore.store
from obstore.exceptions import AlreadyExistsError, PreconditionError

_UPLOAD = ".upload-"


class DiskStore:
    """Objects are files, written by a rename; a folder without one is not there.

    It has the methods of obstore's stores. The version of an object is a hash of its content.
    """

    protocol: ClassVar[str] = "disk"
    number: ClassVar[int] = 0
    calls: ClassVar[list[tuple[str, str]]] = []
    hook: ClassVar[Callable[[int, str, str, bool], None] | None] = None
    """Called with a request's number, name and path, before it is done and after that."""
    _guard: ClassVar[Any] = threading.Lock()

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
    def _request(self, name: str, key: str) -> Generator[Path]:
        hook, path = type(self).hook, Path("/", key)
        with self._guard:
            number = self.number
            type(self).number += 1
            self.calls.append((name, str(path)))
        if hook is not None:
            hook(number, name, str(path), False)
        try:
            yield path
        finally:
            if hook is not None:
                hook(number, name, str(path), True)

    def head(self, key: str) -> dict[str, Any]:
        with self._request("head", key) as file:
            return _info(file)

    def get(self, key: str, *, options: Any = None) -> "Found":
        with self._request("get", key) as file:
            return Found(file.read_bytes(), (options or {}).get("range", (None, None)))

    def list(self, key: str) -> Iterator[Any]:
        with self._request("list", key) as folder:
            found = []
            for file in _below(folder):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(_info(file))
        return iter([found] if found else [])

    def list_with_delimiter(self, key: str) -> Any:
        with self._request("ls", key) as folder:
            found: dict[str, Any] = {"common_prefixes": [], "objects": []}
            for each in sorted(folder.iterdir()) if folder.is_dir() else []:
                with contextlib.suppress(FileNotFoundError):
                    if each.is_dir():
                        found["common_prefixes"] += [_key(each)] if any(_below(each)) else []
                    elif not each.name.startswith(_UPLOAD):
                        found["objects"].append(_info(each))
        return found

    def put(
        self, key: str, content: bytes | Path, *, mode: Any = "overwrite", **sizes: object
    ) -> None:
        with self._request("put", key) as file:
            while True:
                partial = file.parent / f"{_UPLOAD}{secrets.token_hex(8)}"
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    if isinstance(content, Path):
                        shutil.copyfile(content, partial)
                    else:
                        partial.write_bytes(content)
                    _replace(file, partial, mode)
                # The last object of its folder was deleted meanwhile, and the folder with it.
                except (FileNotFoundError, FileExistsError):
                    continue
                return

    def delete(self, key: str) -> None:
        with self._request("delete", key) as file:
            file.unlink()
            for folder in file.parents:
                try:
                    folder.rmdir()
                except OSError:
                    break


class Found:
    """The answer to a read."""

    def __init__(self, content: bytes, part: tuple[int | None, int | None]) -> None:
        self.content = content[slice(*part)]
        self.meta = {"e_tag": _tag(content), "version": None}

    def bytes(self) -> bytes:
        return self.content


def _replace(file: Path, partial: Path, mode: Any) -> None:
    if mode == "overwrite":
        partial.replace(file)
        return
    with (Path(tempfile.gettempdir()) / "disk-store-conditional-writes").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        now = file.read_bytes() if file.exists() else None
        if mode == "create" and now is not None:
            partial.unlink()
            raise AlreadyExistsError(str(file))
        if mode != "create" and (now is None or mode["e_tag"] != _tag(now)):
            partial.unlink()
            raise PreconditionError(str(file))
        partial.replace(file)


def _tag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _key(path: Path) -> str:
    return str(path).lstrip("/")


def _info(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(str(file))
    facts = file.stat()
    modified = datetime.datetime.fromtimestamp(facts.st_mtime, datetime.UTC)
    return {"path": _key(file), "size": facts.st_size, "last_modified": modified}


def _below(folder: Path) -> Generator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names if not name.startswith(_UPLOAD))


_true = obstore.store.from_url


def _from_url(url: str, **options: Any) -> Any:
    return DiskStore() if url.startswith("disk://") else _true(url, **options)


obstore.store.from_url = _from_url  # pyright: ignore
