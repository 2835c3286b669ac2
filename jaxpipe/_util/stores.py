"""Paths on object stores, such as `s3://bucket/run`, through obstore."""

import contextlib
import datetime
import errno
import fcntl
import functools
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
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
_PART_BYTES = 5 << 20
_CLIENT: Any = {
    "allow_http": True,  # for the address of a server that the user has given
    # A read of 64 MB takes longer than the 30 s of the default on a slow network.
    "timeout": datetime.timedelta(minutes=10),
    "read_timeout": datetime.timedelta(seconds=30),
}

T = TypeVar("T")
R = TypeVar("R")


class StoreError(OSError):
    """A request failed or was not answered, after retries."""


@dataclass(frozen=True)
class StorePath:
    """An object on a store, or a folder, which is a common prefix of objects.

    Methods that `pathlib.Path` also has have the same names. A folder exists as long as there are
    objects below it, so folders are neither created nor removed. An object is written completely or
    not at all. There are no links. Every method that sends a request raises StoreError, or
    FileNotFoundError for an object that does not exist.

    Attributes:
        url: The URL that the user gave, without a slash at its end. `str` masks its secrets.
        driver: The store of obstore.
        key: The name of the object in the bucket.
    """

    url: str
    driver: Any = field(repr=False, compare=False)
    key: str = field(repr=False, compare=False)
    _is_folder: bool | None = field(default=None, repr=False, compare=False)

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
        try:
            self.size()
        except FileNotFoundError:
            return self.is_dir()
        return True

    def is_dir(self) -> bool:
        """True for a folder."""
        if self._is_folder is not None:
            return self._is_folder
        with self.asking():
            return any(self.driver.list(self.key))

    def iterdir(self) -> "list[StorePath]":
        """The objects and folders directly in a folder. Empty if it does not exist."""
        with self.asking():
            found = self.driver.list_with_delimiter(self.key)
        keys = dict.fromkeys(found["common_prefixes"], True)
        keys |= {each["path"]: False for each in found["objects"]}
        prefix = self.key + "/"
        return [
            StorePath(f"{self.url}/{key.removeprefix(prefix)}", self.driver, key, is_folder)
            for key, is_folder in sorted(keys.items())
            if key.startswith(prefix)  # not the marker of the folder itself
        ]

    def files(self) -> "dict[StorePath, int]":
        """All objects below a folder, with their sizes in bytes."""
        prefix = self.key + "/"
        with self.asking():
            return {
                self / each["path"].removeprefix(prefix): each["size"]
                for page in self.driver.list(self.key)
                for each in page
                if each["path"].startswith(prefix)
            }

    def size(self) -> int:
        """The size of an object in bytes."""
        with self.asking():
            return self.driver.head(self.key)["size"]

    def modified(self) -> float:
        """When an object was last written, in seconds of the store's clock."""
        with self.asking():
            return self.driver.head(self.key)["last_modified"].timestamp()

    def read_bytes(self, start: int = 0, stop: int | None = None) -> bytes:
        """Read an object, or a range of its bytes, with several requests if it is long."""

        def read(options: Any) -> bytes:
            with self.asking():
                return bytes(self.driver.get(self.key, options=options).bytes())

        if stop is None:
            return read({})
        starts = range(start, stop, _RANGE_BYTES)
        parts = [{"range": (at, min(at + _RANGE_BYTES, stop))} for at in starts]
        return b"".join(at_once(read, parts))

    def read_text(self) -> str:
        """Read an object as text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write an object in one request, so that readers see either the old or the new one."""
        with self.asking(writes=True):
            self.driver.put(self.key, content)

    def write_text(self, content: str) -> None:
        """Write an object in one request."""
        self.write_bytes(content.encode())

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        try:
            with self.asking():
                self.driver.delete(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        """Do nothing: stores have no folders."""

    @contextlib.contextmanager
    def asking(self, *, writes: bool = False) -> Generator[None]:
        """Convert all errors of drivers to StoreError or FileNotFoundError."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # errors of obstore are not OSErrors
            first = _first_line(error)
            if isinstance(error, FileNotFoundError) and not writes:
                raise FileNotFoundError(
                    errno.ENOENT, f"nothing is there: {first}", str(self)
                ) from _without_secrets(error)
            raise StoreError(
                errno.EIO, f"{type(error).__name__}: {first}", str(self)
            ) from _without_secrets(error)


AnyPath = Path | StorePath


def _first_line(error: Exception) -> str:
    return (masked(str(error)).strip().splitlines() or [""])[0][:300]


def _without_secrets(error: Exception) -> Exception | None:
    """Return an error that may be shown as a cause; None for one that shows a secret."""
    return error if masked(str(error)) == str(error) else None


def upload(file: Path, to: StorePath) -> None:
    """Copy a file of any size to a store. Until it is complete, readers see nothing of it."""
    part = max(_PART_BYTES, file.stat().st_size // 9000)  # S3 allows an upload 10,000 parts
    with to.asking(writes=True):
        to.driver.put(to.key, file, chunk_size=part, max_concurrency=4)


def read_version(file: StorePath) -> tuple[str, Mapping[str, str]]:
    """Read an object as text, and its version; both are empty if it does not exist."""
    try:
        with file.asking():
            found = file.driver.get(file.key)
            # Amazon and Azure name an ETag, Google a generation.
            names = [name for name in ("e_tag", "version") if found.meta[name]]
            return bytes(found.bytes()).decode(), {name: found.meta[name] for name in names}
    except FileNotFoundError:
        return "", {}


def replace_version(file: StorePath, version: Mapping[str, str], content: str) -> bool:
    """Write text if an object still has this version; return whether it was written.

    False also if it was written and the answer was lost: the request is repeated, and then finds
    the version that it has written itself.
    """
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with file.asking(writes=True):
        try:
            file.driver.put(file.key, content.encode(), mode=version or "create")
        except (AlreadyExistsError, PreconditionError):
            return False
    return True


def remove_tree(folder: StorePath) -> None:
    """Remove all objects below a folder."""
    at_once(lambda file: file.unlink(missing_ok=True), folder.files())


def open_store(url: str, name: str, error: Callable[[str], Exception]) -> StorePath:
    """The path for a URL. Sends no request.

    `name` is the name of the argument, option or key in errors, and `error` makes the exception.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    try:
        url.encode()  # names of objects are UTF-8
        path = StorePath(url.rstrip("/"), _driver(scheme, bucket), key.rstrip("/"))
    except Exception as refused:  # noqa: BLE001  # drivers read their settings here
        raise error(
            f"{name} must lie on a file system, or on a store that obstore opens, but got "
            f"{name}={shown(url)}, for which it fails with {type(refused).__name__}: "
            f"{_first_line(refused)}. Nothing was read or written. Give a directory or a URL "
            "such as 's3://bucket/run'."
        ) from _without_secrets(refused)
    if not path.key:
        raise error(
            f"{name} must name a folder on the store, but got {name}={shown(url)}. Write for "
            f"instance {scheme + '://bucket/run'!r}."
        )
    return path


@functools.cache
def _driver(scheme: str, bucket: str) -> Any:
    """The one store of a bucket, which keeps its connections, and in memory its objects."""
    from obstore.store import MemoryStore, from_url

    if scheme == "memory":
        return MemoryStore()
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        # obstore itself reads the environment and asks the machine, but reads no profiles.
        with contextlib.suppress(ImportError, ValueError):  # without boto3, or without credentials
            from obstore.auth.boto3 import Boto3CredentialProvider

            # boto3 renews credentials at the latest ten minutes before they expire.
            ttl = datetime.timedelta(minutes=5)
            options["credential_provider"] = Boto3CredentialProvider(ttl=ttl)
    scheme = "gs" if scheme == "gcs" else scheme
    return from_url(f"{scheme}://{bucket}", client_options=_CLIENT, **options)


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
