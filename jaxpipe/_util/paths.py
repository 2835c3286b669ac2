"""Reading the paths that users give."""

import contextlib
import os
import re
from collections.abc import Callable, Generator
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from jaxpipe._util.files import advice, read_file
from jaxpipe._util.stores import AnyPath, StorePath, open_store
from jaxpipe.errors import CheckpointError, ConfigError, shown

# A `pathlib.Path` keeps only one of the two slashes in `s3://bucket`.
_URL = re.compile(r"\s*(\w[\w+.:-]*):/(?:/([^/]*)(?=/|$))?(.*)", re.DOTALL)


def local_path(
    given: str | PathLike[str], name: str, error: Callable[[str], Exception] = ConfigError
) -> Path:
    """The local file or directory for a user's path. A relative path stays relative.

    `~` and `~user` at the beginning are home directories. `file://` is followed by a local path,
    which is percent-decoded. `name` is the name of the argument, option or key in errors, and
    `error` makes the exception.
    """
    path: Any = os.fspath(given) if isinstance(given, str | PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise error(
            f"{name} must be the path of a directory or a file, a string or a pathlib.Path, but "
            f"got {name}={given!r}. Name one, such as 'checkpoints', or '.' for the working "
            "directory."
        )
    url = _URL.match(path)
    if url is not None:
        return _path_of_url(path, *url.groups(default=""), name=name, error=error)
    try:
        found = Path(path).expanduser() if path.startswith("~") else Path(path)
    except RuntimeError as unknown:
        raise error(
            f"{name} must begin with the name of a user after '~', but got "
            f"{name}={shown(path)}. Write the whole path, or {'./' + path!r} for a directory of "
            "that name."
        ) from unknown
    # A literal name such as `./~` must keep its meaning if it is passed on.
    return found.absolute() if str(found).startswith("~") or _URL.match(str(found)) else found


def any_path(
    given: str | PathLike[str] | StorePath,
    name: str,
    error: Callable[[str], Exception] = CheckpointError,
) -> AnyPath:
    """The path for a user's path or URL, on a file system or on a store that obstore opens."""
    if isinstance(given, StorePath):
        return given
    # Nested URLs, such as `simplecache::s3://bucket/run`, name no store.
    url = _URL.match(os.fspath(given)) if isinstance(given, str | PathLike) else None
    if url is None or url[1].lower() == "file" or "::" in url[1] or "\0" in url[0]:
        return local_path(given, name, error)
    scheme, host, rest = url.groups(default="")
    return open_store(f"{scheme.lower()}://{host}{rest}", name, error)


def _path_of_url(
    path: str, scheme: str, host: str, rest: str, *, name: str, error: Callable[[str], Exception]
) -> Path:
    if scheme.lower() != "file":
        raise error(
            f"{name} must lie on a file system of this machine, but got {name}={shown(path)}, and "
            f"{scheme}:// is none. Nothing was read or written. Give a directory, such as one "
            "where the store is mounted, and copy between the two with the store's own tools."
        )
    decoded = b"/" + unquote_to_bytes(rest).lstrip(b"/")
    if host.lower() not in ("", "localhost") or not rest or b"\0" in decoded:
        raise error(
            f"{name} must be file:// and a path from the root, of this machine, but got "
            f"{name}={shown(path)}. Write for instance 'file:///data/run'."
        )
    return Path(os.fsdecode(decoded))


def read_any(path: AnyPath, start: int = 0, stop: int | None = None) -> bytes:
    """Read a small file, or a range of bytes of any file. Raises OSError."""
    if isinstance(path, StorePath):
        return path.read_bytes(start, stop)
    if stop is None:
        return read_file(path)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def size_of(path: AnyPath) -> int:
    """The size of a file in bytes."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


@contextlib.contextmanager
def readable(path: AnyPath) -> Generator[None]:
    """Convert errors of the file system to a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable, but got {error.strerror or error}. "
            f"{advice(error, 'Check the path, its permissions and the file system')}."
        ) from error
