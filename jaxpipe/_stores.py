"""Paths on object stores, such as `s3://bucket/run`, through the drivers of fsspec."""

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

from jaxpipe.errors import masked, shown

_REQUESTS = 16
"""Maximum number of concurrent requests of a process."""
_RANGE_BYTES = 1 << 25
_STAGING = "jaxpipe-staging-"
_CLAIM = ".in_use"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

T = TypeVar("T")
R = TypeVar("R")


class StoreError(OSError):
    """A request failed or was not answered, after the retries of the store's driver."""


@dataclass(frozen=True)
class StorePath:
    """An object on a store, or a folder, which is a common prefix of objects.

    Methods that `pathlib.Path` also has have the same names. A folder exists as long as there are
    objects below it, so folders are neither created nor removed. An object is written completely or
    not at all. There are no links. Every method that sends a request raises StoreError, or
    FileNotFoundError for an object that does not exist.

    Attributes:
        url: The URL that the user gave, without a slash at its end. `str` masks its secrets.
        driver: The file system of fsspec.
        key: The name of the object for the driver.
    """

    url: str
    driver: Any = field(repr=False, compare=False)
    key: str = field(repr=False, compare=False)
    _listed_as: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        # Drivers of stores with versions cut `?versionId=` or `#` and what follows off some paths,
        # so that some requests would reach another object than others.
        split = getattr(self.driver, "split_path", None)
        if split is not None and "/".join(split(self.key)[:2]).strip("/") != self.key.strip("/"):
            raise StoreError(
                errno.EINVAL,
                "a part of this name means the version of an object to the store's driver",
                str(self),
            )

    def __str__(self) -> str:
        return masked(self.url)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(f"{self.url}/{name}", self.driver, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "StorePath":
        """The folder that contains it. The parent of a store's root is the root itself."""
        above, _, name = self.url.rpartition("/")
        if above.endswith("/") or not name:
            return self
        return StorePath(above, self.driver, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "StorePath":
        """A path with another name in the same folder."""
        return self.parent / name

    def absolute(self) -> "StorePath":
        """The path itself, because it does not depend on the working directory."""
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
        """The objects and folders directly in a folder. Empty if it does not exist."""
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
            # Some drivers list an object as its own only content, or the marker of a folder.
            if key.startswith(prefix) and key != prefix
        ]

    def files(self) -> "dict[StorePath, int]":
        """All objects below a folder, with their sizes in bytes."""
        prefix = self.key.rstrip("/") + "/"
        with self.asking():
            found: dict[str, Any] = self.driver.find(self.key, detail=True)
        return {
            self / key.removeprefix(prefix): int(each["size"] or 0)
            for key, each in found.items()
            if key.startswith(prefix)
        }

    def size(self) -> int:
        """The size of an object in bytes."""
        with self.asking():
            return self.driver.size(self.key)

    def modified(self) -> float:
        """When an object was last written, in seconds of the store's clock."""
        with self.asking():
            return self.driver.modified(self.key).timestamp()

    def read_bytes(self, start: int | None = None, stop: int | None = None) -> bytes:
        """Read an object, or a range of its bytes."""
        with self.asking():
            return self.driver.cat_file(self.key, start=start, end=stop)

    def read_text(self) -> str:
        """Read an object as text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write an object in one request, so that readers see either the old or the new one."""
        with self.asking(writes=True):
            self.driver.pipe_file(self.key, content)

    def write_text(self, content: str) -> None:
        """Write an object in one request."""
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
        """Remove a folder if it is empty and the store has real folders."""
        # For a bucket, some drivers would remove the bucket itself.
        if "/" in self.key.strip("/"):
            with contextlib.suppress(Exception):
                if self.driver.isdir(self.key) and not self.iterdir():
                    self.driver.rmdir(self.key)

    @contextlib.contextmanager
    def asking(self, *, writes: bool = False) -> Generator[None]:
        """Convert all errors of drivers to StoreError or FileNotFoundError."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # errors of botocore and aiohttp are not OSErrors
            first = _first_line(error, self.url)
            if isinstance(error, FileNotFoundError) and not writes:
                raise FileNotFoundError(
                    errno.ENOENT, f"nothing is there: {first}", str(self)
                ) from _without_secrets(error, self.url)
            raise StoreError(
                errno.EIO, f"{type(error).__name__}: {first}", str(self)
            ) from _without_secrets(error, self.url)


AnyPath = Path | StorePath


def _masked(error: Exception, url: str) -> str:
    """The text of a driver's error, which may name the URL without its scheme."""
    scheme, _, rest = url.partition("://")
    login = rest[: rest.rfind("@") + 1]
    text = str(error)
    return masked(text.replace(login, masked(f"{scheme}://{login}")[len(scheme) + 3 :]))


def _first_line(error: Exception, url: str) -> str:
    return (_masked(error, url).strip().splitlines() or [""])[0][:300]


def _without_secrets(error: Exception, url: str) -> Exception | None:
    """Return an error that may be shown as a cause; None for one that shows a secret."""
    return error if _masked(error, url) == str(error) else None


def upload(file: Path, to: StorePath) -> None:
    """Copy a file of any size to a store. Until it is complete, readers may see a part of it."""
    with to.asking(writes=True):
        to.driver.put_file(str(file), to.key)


def read_range(file: StorePath, start: int, stop: int) -> bytes:
    """Read a range of bytes of any size, with several concurrent requests."""
    starts = range(start, stop, _RANGE_BYTES)
    parts = at_once(lambda at: file.read_bytes(at, min(at + _RANGE_BYTES, stop)), starts)
    return b"".join(parts)


def remove_tree(folder: StorePath) -> None:
    """Remove all objects below a folder."""
    files = list(folder.files())
    at_once(lambda file: file.unlink(missing_ok=True), files)
    if files and folder.exists():  # a store with real folders
        above = {file.parent for file in files} - {folder}
        while above:
            for each in above:
                each.rmdir()
            above = {each.parent for each in above} - {folder}
        folder.rmdir()


def open_store(url: str, name: str, error: Callable[[str], Exception]) -> StorePath:
    """The path for a URL, after checking that its driver is installed. Sends no request.

    `name` is the name of the argument, option or key in errors, and `error` makes the exception.
    """
    import fsspec

    scheme = url.partition(":")[0]
    try:
        url.encode()  # names of objects are UTF-8
        # Other processes also write there, so an earlier listing may be out of date.
        driver, key = fsspec.core.url_to_fs(url, use_listings_cache=False)
        path = StorePath(url.rstrip("/"), driver, str(key).rstrip("/"))
    except ImportError as missing:
        extra = _EXTRAS.get(scheme.lower())
        repair = f"pip install 'jaxpipe[{extra}]'" if extra else "Install it"
        raise error(
            f"{name} must lie on a file system, or on a store whose driver for fsspec is installed,"
            f" but got {name}={shown(url)}: {missing}. Nothing was read or written. {repair}."
        ) from missing
    except Exception as refused:  # noqa: BLE001  # drivers read their settings here
        raise error(
            f"{name} must lie on a file system, or on a store that fsspec opens, but got "
            f"{name}={shown(url)}, for which it fails with {type(refused).__name__}: "
            f"{_first_line(refused, url)}. Nothing was read or written. Give a directory or a URL "
            "such as 's3://bucket/run'."
        ) from _without_secrets(refused, url)
    if not path.key.strip("/"):
        raise error(
            f"{name} must name a folder on the store, but got {name}={shown(url)}. Write for "
            f"instance {scheme + '://bucket/run'!r}."
        )
    return path


def at_once(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Apply a function to many objects, several at a time."""
    items = list(items)
    if len(items) < 2:
        return [action(item) for item in items]
    # All calls end before the first error is raised.
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(action, items))


@contextlib.contextmanager
def staging_folder() -> Generator[Path]:
    """A folder in `TMPDIR` for files that are sent to a store or read from it, then removed."""
    top = Path(tempfile.gettempdir())
    # Folders of processes that were killed.
    _remove_leftovers(top)
    folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=top))
    try:
        with (folder / f"{_CLAIM}.new").open("wb") as claim:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(claim, fcntl.LOCK_EX)  # until the process ends, in any way
            # Renamed only now, so that no other process finds it without its lock.
            (folder / f"{_CLAIM}.new").rename(folder / _CLAIM)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(top: Path) -> None:
    for left in top.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError), (left / _CLAIM).open("rb") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
