"""What a save does otherwise on an object store than on a file system; the one place that asks.

A store has no rename, no folders, no links and nothing to sync: an object appears whole by one
request, and stays. So what is done in several steps on a file system is one write there.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from jaxpipe._files import sync
from jaxpipe._stores import AnyPath, StoreError, StorePath, at_once, remove_tree

PARTIAL = ".partial"
MARK = ".jaxpipe"
"""In a folder of data that a save has made."""

T = TypeVar("T")


class NotSyncedError(OSError):
    """A file was replaced, but may be the old one again after a loss of power."""


def replace_file(path: AnyPath, content: bytes) -> None:
    """Write a file so that at every moment it is the old one or the new one.

    It stays after a loss of power. Raises NotSyncedError where it is the new one, but may not stay,
    and OSError where it is the old one.
    """
    if isinstance(path, StorePath):
        try:
            path.write_bytes(content)
        except StoreError:
            with contextlib.suppress(OSError):
                if path.read_bytes() == content:  # the answer was lost, not the request
                    return
            raise
        return
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:  # a new file, so that nothing is written through a link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    try:
        sync([path.parent])
    except OSError as error:
        raise NotSyncedError(error.errno, error.strerror, str(path)) from error


def send(path: AnyPath, text: str) -> None:
    """Write a file of which readers see nothing or all; it may go with a loss of power."""
    if isinstance(path, StorePath):
        path.write_text(text)
        return
    partial = path.with_suffix(PARTIAL)
    partial.write_text(text)
    partial.replace(path)


def sync_tree(folder: AnyPath) -> None:
    """Let all below a folder stay after a loss of power: the files, then the names in folders.

    Then the names of the two folders above.
    """
    if isinstance(folder, StorePath):
        return

    def fail(error: OSError) -> None:  # otherwise a folder that cannot be listed is passed over
        raise error

    places = [(Path(place), names) for place, _, names in os.walk(folder, onerror=fail)]
    sync(place / name for place, names in places for name in names)
    sync(place for place, _ in places)
    sync([folder.parent, folder.parent.parent])


def make_folder(folder: AnyPath) -> None:
    """Make a folder and those that it lies in, which stay after a loss of power."""
    if isinstance(folder, StorePath):
        return
    try:
        folder.mkdir()
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        make_folder(folder)
    except OSError:
        if not folder.is_dir():
            raise
    else:
        sync([folder.parent])


def make_marked(data: AnyPath, inside: str) -> None:
    """Make a new folder with a mark in it, and a folder of that name beside the mark."""
    if isinstance(data, StorePath):
        (data / MARK).write_bytes(b"")
        return
    data.parent.mkdir(parents=True, exist_ok=True)
    data.mkdir()
    (data / MARK).mkdir()
    (data / inside).mkdir()


def was_made_here(data: AnyPath, inside: str) -> bool:
    """True for a folder by the name of data that a save has made; a link never is one."""
    if data.is_symlink() or not data.is_dir():
        return False
    if isinstance(data, StorePath):
        # By its name alone: what copies a checkpoint to a store leaves the mark out, an empty
        # folder, and nobody makes others there by hand.
        return True
    # A save that failed removes its folder with the mark, and writers that were late make it again
    # without.
    names = {path.name for path in data.iterdir()}
    return MARK in names or names <= {inside}


def remove_marked(data: AnyPath) -> None:
    """Remove a folder that was made with a mark, which goes last."""
    if isinstance(data, StorePath):
        remove_tree(data)
        return
    for inner in [inner for inner in data.iterdir() if inner.name != MARK]:
        shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    shutil.rmtree(data)


def try_to_remove(folder: AnyPath) -> None:
    """Remove of a folder what can be removed now."""
    if isinstance(folder, StorePath):
        with contextlib.suppress(OSError):
            remove_tree(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: AnyPath) -> None:
    """Let the names in a folder stay after a loss of power."""
    if not isinstance(folder, StorePath):
        sync([folder])


def partials(folder: AnyPath, names: Sequence[str]) -> list[AnyPath]:
    """What `replace_file` has left of these names when its process was killed."""
    if isinstance(folder, StorePath):
        return []
    paths = [folder / (name + PARTIAL) for name in names]
    return [path for path in paths if path.exists() or path.is_symlink()]


def present(folder: AnyPath, names: Iterable[str]) -> set[str]:
    """Which of these files are in a folder."""
    if isinstance(folder, StorePath):
        return {path.name for path in folder.iterdir()} & set(names)  # one request for all
    return {name for name in names if (folder / name).exists()}


def read_each(paths: Sequence[AnyPath], action: Callable[[AnyPath], T]) -> list[T]:
    """Do the same to several files; requests to a store go out at once."""
    on_store = any(isinstance(path, StorePath) for path in paths)
    return at_once(action, paths) if on_store else [action(path) for path in paths]


def size(path: AnyPath) -> int:
    """Bytes of a file."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def link_of(path: AnyPath) -> Path | None:
    """Where a link leads; None for what is none."""
    return path.readlink() if isinstance(path, Path) and path.is_symlink() else None


def file_sizes(folder: AnyPath) -> list[int]:
    """Bytes of all files below a folder; of none that comes or goes meanwhile."""
    if isinstance(folder, StorePath):
        return list(folder.files().values())
    sizes: list[int] = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append((Path(place) / name).stat().st_size)
    return sizes


def touch(file: AnyPath) -> None:
    """Change the time of a file that is there; raises FileNotFoundError where it is not."""
    if isinstance(file, StorePath):
        file.write_bytes(file.read_bytes())
    else:
        os.utime(file)


def changed(file: AnyPath) -> float | None:
    """When a file has changed, by the clock of its storage; None where it is not there."""
    try:
        if isinstance(file, StorePath):
            return file.modified()
        # Network file systems answer from memory otherwise.
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(number).st_mtime
    finally:
        os.close(number)


def is_same(file: AnyPath, other: AnyPath) -> bool:
    """True if two paths lead to one file."""
    if isinstance(file, Path) and isinstance(other, Path):
        return file.samefile(other)
    return file == other


def identity(folder: AnyPath) -> str:
    """What a copy of a folder has not."""
    return folder.url if isinstance(folder, StorePath) else str(folder.stat().st_ino)


def repair(path: AnyPath, of_files: str) -> str:
    """What to do where a path cannot be written: `of_files`, or its counterpart on a store."""
    if isinstance(path, StorePath):
        return (
            "Check the bucket, its permissions, the credentials and the network, and that TMPDIR "
            "has room"
        )
    return of_files
