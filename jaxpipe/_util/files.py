"""Access to users' files that never blocks on a pipe, reads a device, or writes through a link."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Generator, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 1 << 30
"""Maximum bytes of a file that is read as a whole."""
PARTIAL = ".partial"
"""Suffix of the names of incomplete files."""
_NOT_SYNCED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EISDIR, errno.EACCES, errno.EPERM)


def lacks_descriptors(error: BaseException) -> bool:
    """Whether an operation failed because this process may not open more files."""
    # The libraries raise many types for this, with the system's text in them.
    return os.strerror(errno.EMFILE) in str(error)


def advice(error: BaseException, otherwise: str) -> str:
    """Suggest a repair for a failed operation on files, as a sentence without its full stop."""
    if lacks_descriptors(error):
        return "This process has no free file descriptor: raise its limit with 'ulimit -n 65536'"
    return otherwise


def check_is_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError for anything but a regular file: opening affects some devices."""
    _check_mode(Path(path).stat().st_mode, path)


def read_file(path: str | os.PathLike[str], most_bytes: int = LARGEST) -> bytes:
    """Read a regular file of at most `most_bytes`, but not a pipe, which might never end."""
    check_is_file(path)
    # O_NONBLOCK: opening a pipe that was created after the check would wait for its other end.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        _check_mode(found.st_mode, path)
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"a file of {found.st_size} bytes", os.fspath(path))
        return file.read()


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically. A link is replaced instead of followed."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    # Such as `/dev/stdout` or a pipe, which must not be replaced.
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with new_beside(path) as partial:
        with open_to_change(partial) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextlib.contextmanager
def new_beside(path: Path) -> Generator[Path]:
    """Create a file with a random name next to another one, and remove it unless it is renamed."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    partial.open("xb").close()
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def open_to_change(path: Path) -> BinaryIO:
    """Open an existing file to write anywhere in it. Raises OSError for a link or a pipe."""
    return os.fdopen(_opened(path, os.O_WRONLY), "wb")


def open_to_append(path: Path, *, anew: bool = False) -> FileIO:
    """Open a file to append to it, unbuffered. With `anew` its content is removed first.

    Raises OSError for a link to a file, and for a pipe.
    """
    file = FileIO(_opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a")
    if anew and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.truncate(0)
    return file


def _opened(path: Path, flags: int) -> int:
    # A link to a device such as /dev/null is allowed, because it does not lead to anyone's file.
    is_device = path.is_char_device()
    try:
        number = os.open(path, flags | os.O_NONBLOCK | (0 if is_device else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(
            errno.ELOOP, f"{path.name} is a link, through which nothing is written", str(path)
        ) from error
    found = os.fstat(number).st_mode
    if stat.S_ISCHR(found) != is_device or not (is_device or stat.S_ISREG(found)):
        os.close(number)
        raise OSError(errno.EINVAL, f"{path.name} is not a file", str(path))
    return number


def _check_mode(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(
            errno.EINVAL, "something other than a file: a folder, pipe or device", os.fspath(path)
        )


def sync(paths: Iterable[Path]) -> None:
    """Flush files, or the names in folders, so that they survive a loss of power."""
    for path in paths:
        try:
            number = os.open(path, os.O_RDONLY)
            try:
                os.fsync(number)
            finally:
                os.close(number)
        except OSError as error:
            if error.errno not in _NOT_SYNCED:
                raise


def parse_json(content: bytes) -> Any:
    """Parse a JSON text. Raises ValueError also if it is nested too deep."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
