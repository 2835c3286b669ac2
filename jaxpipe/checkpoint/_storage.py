"""File operations that differ between file systems and object stores.

Only this module distinguishes the two. A store has no rename, no folders, no links and nothing to
sync: one request makes an object visible, complete and durable. So operations that take several
steps on a file system are a single write on a store.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxpipe._util.files import advice, sync
from jaxpipe._util.stores import AnyPath, StoreError, StorePath, remove_tree

PARTIAL = ".partial"
MARK = ".jaxpipe"
"""Name of the mark in a folder of data that a save has made."""


class NotSyncedError(OSError):
    """A file was replaced, but the replacement may be lost in a power failure."""


def replace_file(path: AnyPath, content: bytes) -> None:
    """Replace a file atomically and durably: readers see the old content or the new content.

    Raises NotSyncedError if the file was replaced but may not survive a power failure, and OSError
    if it was not replaced.
    """
    if isinstance(path, StorePath):
        try:
            path.write_bytes(content)
        except StoreError:
            with contextlib.suppress(OSError):
                if path.read_bytes() == content:  # the response was lost, not the request
                    return
            raise
        return
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:  # always a new file: never write through a link
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
    """Write a file atomically but not durably: a power failure may remove it."""
    if isinstance(path, StorePath):
        path.write_text(text)
        return
    partial = path.with_suffix(PARTIAL)
    partial.write_text(text)
    partial.replace(path)


def sync_tree(folder: AnyPath) -> None:
    """Sync everything below a folder to disk: files, folders, and last the two folders above."""
    if isinstance(folder, StorePath):
        return

    def fail(error: OSError) -> None:  # by default `os.walk` skips a folder that it cannot list
        raise error

    places = [(Path(place), names) for place, _, names in os.walk(folder, onerror=fail)]
    # Contents first, so that no entry on disk names a file that is not.
    sync(place / name for place, names in places for name in names)
    sync(place for place, _ in places)
    sync([folder.parent, folder.parent.parent])


def make_folder(folder: AnyPath) -> None:
    """Make a folder and its parents, durably."""
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
    """Make a new folder that contains a mark and a folder named `inside`."""
    if isinstance(data, StorePath):
        (data / MARK).write_bytes(b"")
        return
    data.parent.mkdir(parents=True, exist_ok=True)
    data.mkdir()
    (data / MARK).mkdir()
    (data / inside).mkdir()


def was_made_here(data: AnyPath, inside: str) -> bool:
    """Whether a save has made this folder of data; always False for a link."""
    if data.is_symlink() or not data.is_dir():
        return False
    if isinstance(data, StorePath):
        # Decided only by the name. A tool that copies a checkpoint to a store drops the mark, which
        # is an empty folder, and nobody makes folders of this name there by hand.
        return True
    # A failed save removes its folder with the mark, and late writers recreate it without the mark.
    names = {path.name for path in data.iterdir()}
    return MARK in names or names <= {inside}


def remove_marked(data: AnyPath) -> None:
    """Remove a folder that was made with a mark; the mark is removed last."""
    if isinstance(data, StorePath):
        remove_tree(data)
        return
    for inner in [inner for inner in data.iterdir() if inner.name != MARK]:
        shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    shutil.rmtree(data)


def try_to_remove(folder: AnyPath) -> None:
    """Remove as much of a folder as can be removed now."""
    if isinstance(folder, StorePath):
        with contextlib.suppress(OSError):
            remove_tree(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: AnyPath) -> None:
    """Sync the entries of a folder to disk."""
    if not isinstance(folder, StorePath):
        sync([folder])


def partials(folder: AnyPath, names: Sequence[str]) -> list[AnyPath]:
    """Return the temporary files that killed calls of `replace_file` left for these names."""
    if isinstance(folder, StorePath):
        return []
    paths = [folder / (name + PARTIAL) for name in names]
    return [path for path in paths if path.exists() or path.is_symlink()]


def present(folder: AnyPath, names: Iterable[str]) -> set[str]:
    """Return those of the named files that are in a folder."""
    if isinstance(folder, StorePath):
        return {path.name for path in folder.iterdir()} & set(names)  # one request for all
    return {name for name in names if (folder / name).exists()}


def link_of(path: AnyPath) -> Path | None:
    """Return the target of a link; None if the path is not a link."""
    return path.readlink() if isinstance(path, Path) and path.is_symlink() else None


def file_sizes(folder: AnyPath) -> list[int]:
    """Return the sizes of all files below a folder; files that disappear meanwhile are skipped."""
    if isinstance(folder, StorePath):
        return list(folder.files().values())
    sizes: list[int] = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.append((Path(place) / name).stat().st_size)
    return sizes


def touch(file: AnyPath) -> None:
    """Update the modification time of an empty file, which must exist on a file system."""
    if isinstance(file, StorePath):
        file.write_bytes(b"")
    else:
        os.utime(file)


def changed(file: AnyPath) -> float | None:
    """Return a file's modification time by its storage's clock; None if it does not exist."""
    try:
        if isinstance(file, StorePath):
            return file.modified()
        # Opening the file keeps network file systems from answering from a cache.
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(number).st_mtime
    finally:
        os.close(number)


def is_same(file: AnyPath, other: AnyPath) -> bool:
    """Whether two paths are the same file."""
    if isinstance(file, Path) and isinstance(other, Path):
        return file.samefile(other)
    return file == other


def identity(folder: AnyPath) -> str:
    """Return a text that identifies a folder and differs for a copy of it."""
    return folder.url if isinstance(folder, StorePath) else str(folder.stat().st_ino)


def repair(path: AnyPath, of_files: str, error: BaseException) -> str:
    """Suggest a repair after a failure at a path: `of_files`, or a hint for a store."""
    if isinstance(path, StorePath):
        of_files = (
            "Check the bucket, its permissions, the credentials and the network, and that TMPDIR "
            "has room"
        )
    return advice(error, of_files)
