"""Paths on object stores, such as `s3://bucket/run`, by the drivers of fsspec."""

import contextlib
import errno
import fcntl
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxpipe.errors import shown

_REQUESTS = 16
"""Requests of one process at a time."""
_RANGE_BYTES = 1 << 25
_STAGING, _CLAIM = "jaxpipe-staging-", ".in_use"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

T = TypeVar("T")
R = TypeVar("R")


class StoreError(OSError):
    """A request that a store refused or did not answer, once its driver has given up."""


@dataclass(frozen=True)
class StorePath:
    """An object on a store, or the common beginning of several: its folder.

    It has the names of `pathlib.Path` for what both do. A folder is there while an object is below
    it, so that none is made or removed; one object is written whole or not at all; and nothing is a
    link. Every method that asks the store raises StoreError, or FileNotFoundError for an object
    that is not there.

    Attributes:
        url: As the user gives it, without a slash at its end.
        driver: The file system of fsspec.
        key: What the driver calls it.
    """

    url: str
    driver: Any = field(repr=False, compare=False)
    key: str = field(repr=False, compare=False)
    _listed_as: str = field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}", self.driver, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        """The folder that it lies in; of a store's root the root."""
        above, _, name = self.url.rpartition("/")
        if above.endswith("/") or not name:
            return self
        return StorePath(above, self.driver, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "StorePath":
        """Another one beside it."""
        return self.parent / name

    def absolute(self) -> "StorePath":
        """Itself: no working directory changes it."""
        return self

    def is_symlink(self) -> bool:
        """False: stores have no links."""
        return False

    def exists(self) -> bool:
        """True for an object and for a folder."""
        with self.asking():
            return self.driver.exists(self.key)

    def is_dir(self) -> bool:
        """True for a folder."""
        if self._listed_as:
            return self._listed_as == "directory"
        with self.asking():
            return self.driver.isdir(self.key)

    def iterdir(self) -> "list[StorePath]":
        """What lies directly in a folder; nothing where there is none."""
        try:
            with self.asking():
                found = self.driver.ls(self.key, detail=True)
        except FileNotFoundError:
            return []
        prefix = self.key.rstrip("/") + "/"
        names = {each["name"].rstrip("/"): each["type"] for each in found}
        return [
            StorePath(f"{self.url}/{key.removeprefix(prefix)}", self.driver, key, kind)
            for key, kind in sorted(names.items())
            # Some drivers list an object as the one thing in itself, or a folder's own mark.
            if key.startswith(prefix) and key != prefix
        ]

    def files(self) -> "dict[StorePath, int]":
        """All objects below a folder, with their bytes."""
        prefix = self.key.rstrip("/") + "/"
        with self.asking():
            found: dict[str, Any] = self.driver.find(self.key, detail=True)
        return {
            self / key.removeprefix(prefix): int(each["size"] or 0)
            for key, each in found.items()
            if key.startswith(prefix)
        }

    def size(self) -> int:
        """Bytes of an object."""
        with self.asking():
            return self.driver.size(self.key)

    def modified(self) -> float:
        """When an object was last written, in seconds by the clock of the store."""
        with self.asking():
            return self.driver.modified(self.key).timestamp()

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """An object, or the bytes of a range of it."""
        with self.asking():
            return self.driver.cat_file(self.key, start=start, end=stop)

    def read_text(self) -> str:
        """An object as a text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write an object by one request: it is the old one or the new one."""
        with self.asking(writes=True):
            self.driver.pipe_file(self.key, content)

    def write_text(self, content: str) -> None:
        """Write an object by one request."""
        self.write_bytes(content.encode())

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        try:
            with self.asking():
                self.driver.rm_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Remove an empty folder where the store has some; one that is not empty stays."""
        # Of a bucket it would be the bucket, with some drivers.
        if "/" in self.key.strip("/"):
            with contextlib.suppress(Exception):
                if self.driver.isdir(self.key) and not self.iterdir():
                    self.driver.rmdir(self.key)

    @contextlib.contextmanager
    def asking(self, *, writes: bool = False) -> Generator[None]:
        """Make one of two kinds of errors of all that drivers raise."""
        try:
            yield
        except Exception as error:  # those of botocore and aiohttp are no OSError
            first = (str(error).strip().splitlines() or [""])[0][:300]
            if isinstance(error, FileNotFoundError) and not writes:
                raise FileNotFoundError(errno.ENOENT, f"nothing is there: {first}", self.url) from (
                    error
                )
            raise StoreError(errno.EIO, f"{type(error).__name__}: {first}", self.url) from error


AnyPath = Path | StorePath


def upload(file: Path, to: StorePath) -> None:
    """Copy a file of any size to a store; readers may see a part of it meanwhile."""
    with to.asking(writes=True):
        to.driver.put_file(str(file), to.key)


def read_range(file: StorePath, start: int, stop: int) -> bytes:
    """The bytes of a range of any size, by several requests at a time."""
    starts = range(start, stop, _RANGE_BYTES)
    parts = at_once(lambda at: file.read_bytes(at, min(at + _RANGE_BYTES, stop)), starts)
    return b"".join(parts)


def remove_tree(folder: StorePath) -> None:
    """Remove all objects below a folder."""
    files = list(folder.files())
    at_once(lambda file: file.unlink(missing_ok=True), files)
    if files and folder.exists():  # a store that has folders
        above = {file.parent for file in files} - {folder}
        while above:
            for each in above:
                each.rmdir()
            above = {each.parent for each in above} - {folder}
        folder.rmdir()


def open_store(url: str, name: str, error: Callable[[str], Exception]) -> StorePath:
    """The path that a URL means, once its driver is there; asks nothing of the store.

    `name` is the argument, option or key that it was given as. Raises what `error` makes of a
    message.
    """
    import fsspec

    scheme = url.partition(":")[0]
    try:
        # Others write there too: what was listed once is not what is there now.
        driver, key = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as missing:
        extra = _EXTRAS.get(scheme.lower())
        repair = f"pip install 'jaxpipe[{extra}]'" if extra else "Install it"
        raise error(
            f"{name} must lie on a file system, or on a store whose driver for fsspec is installed,"
            f" but got {name}={shown(url)}: {missing}. Nothing was read or written. {repair}."
        ) from missing
    except Exception as refused:  # drivers read their settings here
        raise error(
            f"{name} must lie on a file system, or on a store that fsspec opens, but got "
            f"{name}={shown(url)}, for which it fails with {type(refused).__name__}: "
            f"{str(refused)[:300]}. Nothing was read or written. Give a directory or a URL such as "
            "'s3://bucket/run'."
        ) from refused
    key = str(key).rstrip("/")
    if not key.strip("/"):
        raise error(
            f"{name} must name a folder on the store, but got {name}={shown(url)}. Write for "
            f"instance {scheme + '://bucket/run'!r}."
        )
    return StorePath(url.rstrip("/"), driver, key)


def at_once(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Do the same to many objects, several at a time.

    Raises the first error once all have ended.
    """
    items = list(items)
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(action, items))


@contextlib.contextmanager
def staging_folder() -> Generator[Path]:
    """A folder for files on their way to a store or from it, in the temporary directory.

    It is removed at the end; that of a process that was killed, by the next one. `TMPDIR` says
    where that directory is.
    """
    top = Path(tempfile.gettempdir())
    _remove_leftovers(top)
    folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=top))
    try:
        with (folder / f"{_CLAIM}.new").open("wb") as claim:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(claim, fcntl.LOCK_EX)  # until the process ends, however it does
            # Now, so that no other process finds it there and not locked.
            (folder / f"{_CLAIM}.new").rename(folder / _CLAIM)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(top: Path) -> None:
    for left in top.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError), (left / _CLAIM).open("rb") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
