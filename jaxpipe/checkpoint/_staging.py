"""Arrays on an object store, staged in local files that Orbax writes and reads.

Orbax and TensorStore have their own drivers for some stores, but Orbax 0.12 opens only `gs://`,
and both take credentials and addresses from other sources than obstore, which writes the rest of a
checkpoint. Staging works the same way for all stores. Each process writes its blocks to its own
folder in the temporary directory, and uploads that folder. Process 0 combines all blocks by
reference; for that it needs the nodes of their B-trees but no values. A reader downloads the nodes,
and only those ranges of the values that hold the arrays it needs, into files with holes elsewhere.

Temporary disk space: while a process saves, its share of the checkpoint; while it loads, the
arrays that are read at a time (`_store._READ_BYTES`, or the largest array).

On a file system, Orbax works in the checkpoint's own folder.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jaxpipe._util.paths import read_any
from jaxpipe._util.stores import AnyPath, StoreError, StorePath, at_once, staging_folder, upload

_MANIFEST = "manifest.ocdbt"
_PROCESS = "ocdbt.process_"
_METADATA = b"/zarr.json"
"""Follows an array's name in the one key of it that is not a chunk's."""
_GAP_BYTES = 64 << 10
_REQUEST_BYTES = 64 << 20
"""Ranges of a file with at most this gap become one request, and the largest size of a request."""


@contextlib.contextmanager
def to_write(arrays: AnyPath) -> Generator[Path]:
    """Yield the folder in which Orbax writes this process's blocks; upload it at the end."""
    if not isinstance(arrays, StorePath):
        with _as_plain_name(arrays) as folder:
            yield folder
        return
    with staging_folder() as top:
        folder = top / arrays.name
        folder.mkdir()
        yield folder
        _upload(folder, arrays, _files(folder))


@contextlib.contextmanager
def to_finish(arrays: AnyPath) -> Generator[Path]:
    """Yield the folder in which Orbax combines the blocks of all processes."""
    if not isinstance(arrays, StorePath):
        with _as_plain_name(arrays) as folder:
            yield folder
        return
    with staging_folder() as top:
        folder = top / arrays.name
        folder.mkdir()
        parts = [path for path in arrays.iterdir() if path.name.startswith(_PROCESS)]
        for part, tree in zip(parts, at_once(_Tree, parts), strict=True):
            tree.write_nodes(folder / part.name)
        before = set(_files(folder))
        yield folder
        _upload(folder, arrays, [name for name in _files(folder) if name not in before])


@contextlib.contextmanager
def _as_plain_name(arrays: Path) -> Generator[Path]:
    """Yield a path of a folder that Orbax and TensorStore read as it is meant."""
    # Orbax 0.12 finds the written blocks by a glob pattern made from the whole path: one with a
    # bracket silently matches nothing. TensorStore reads a backslash as a slash, so that it writes
    # to another folder, and takes no path that is not UTF-8.
    name = str(arrays.absolute())
    if not set("[\\") & set(name) and name == name.encode(errors="replace").decode():
        yield arrays
        return
    with staging_folder() as top:
        folder = top / arrays.name
        folder.symlink_to(arrays.absolute())
        yield folder


def num_written(folder: Path, process_index: int) -> int:
    """Return how many chunks a process has written in the folder of `to_write`."""
    part = folder / f"{_PROCESS}{process_index}"
    return _Tree(part).num_chunks.total() if part.exists() else 0  # it may hold only others' copies


def check_arrays(arrays: AnyPath, num_chunks: int, num_blocks: Mapping[str, int]) -> None:
    """Open the arrays as a reader does; raise OSError unless they are whole.

    Args:
        arrays: The folder of the database.
        num_chunks: How many chunks all processes have written.
        num_blocks: Into how many blocks the devices divide each array. Replicas may share the
            writing of a block, so that it is several chunks.
    """
    # A folder that a library takes for another, or a wrong listing, shows only here.
    found = _Tree(arrays).num_chunks
    if found.total() != num_chunks:
        text = f"{arrays} holds {found.total()} of the {num_chunks} chunks that were written"
        raise OSError(text)
    # Orbax was once seen to return from a save that had left out blocks of one array.
    for name, wanted in num_blocks.items():
        if not found[name] or found[name] % wanted:
            raise OSError(f"{arrays} holds {found[name]} of the {wanted} blocks of {name}")


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _upload(folder: Path, to: StorePath, names: Iterable[str]) -> None:
    at_once(lambda name: upload(folder / name, to / name), names)


class Arrays:
    """The arrays of a checkpoint, for reading."""

    def __init__(self, path: AnyPath) -> None:
        self._path = path
        self._tree: _Tree | None = None

    @contextlib.contextmanager
    def holding(self, names: Sequence[str]) -> Generator[Path]:
        """Yield a folder with these arrays; on a file system, it is the folder of all arrays."""
        if not isinstance(self._path, StorePath):
            with _as_plain_name(self._path) as folder:
                yield folder
            return
        if self._tree is None:
            self._tree = _Tree(self._path)
        with staging_folder() as top:
            folder = top / self._path.name
            self._tree.write_nodes(folder)
            self._tree.write_values(folder, names)
            yield folder


@dataclass(frozen=True, order=True)
class _Range:
    """A range of bytes of a file, which is given by its path below the arrays' folder."""

    file: str
    start: int
    stop: int


class _Tree:
    """The tree of a TensorStore OCDBT database, which maps keys to the locations of values."""

    def __init__(self, path: AnyPath) -> None:
        # Chunks of arrays, without their metadata.
        self.num_chunks = Counter[str]()
        self._path = path
        self._values: dict[str, list[_Range]] = {}
        files = [each for each in path.iterdir() if not each.is_dir()]
        if not any(each.name == _MANIFEST for each in files):
            raise FileNotFoundError(f"{path / _MANIFEST} is missing")
        self._nodes = {
            _Range(each.name, 0, len(content)): content
            for each, content in zip(files, at_once(read_any, files), strict=True)
        }
        with staging_folder() as folder:
            self._walk(folder)

    def write_nodes(self, folder: Path) -> None:
        """Write the database's files with holes instead of values."""
        _fill(folder, self._nodes)

    def write_values(self, folder: Path, names: Sequence[str]) -> None:
        """Fill in the values of some arrays."""
        wanted = [part for name in names for part in self._values.get(name, ())]
        for parts in _batches(_joined(wanted)):
            _fill(folder, _read(self._path, parts))

    def _walk(self, folder: Path) -> None:
        import tensorstore as ts

        _fill(folder, self._nodes)
        base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
        manifest: Any = ts.ocdbt.dump(base).result()
        level = _locations(manifest["versions"][-1]["root"].get("location"))
        while level:
            found = _read(self._path, list(level.values()))
            _fill(folder, found)
            self._nodes |= found
            entries = [
                entry
                for node in at_once(lambda at: ts.ocdbt.dump(base, at).result(), level)
                for entry in node["entries"]
            ]
            for entry in entries:
                if "key" in entry and not entry["key"].endswith(_METADATA):
                    self.num_chunks[_array_of(entry["key"].decode())] += 1
                for part in _locations(entry.get("indirect_value")).values():
                    name = _array_of(entry["key"].decode())
                    self._values.setdefault(name, []).append(part)
            level = _locations(*(entry.get("location") for entry in entries))


def _array_of(key: str) -> str:
    """Return the array's name from a zarr chunk key, `<name>/c/<index>/<index>`."""
    parts = key.split("/")
    while parts and parts[-1].isdigit():
        parts.pop()
    return "/".join(parts[:-1])


def _locations(*texts: str | None) -> dict[str, _Range]:
    """Parse locations of the form `<kind>:<folder>:<file>:<offset>:<length>` into ranges."""
    found: dict[str, _Range] = {}
    for text in texts:
        if text is not None:
            _, *file, offset, length = text.split(":")
            name = unquote("".join(file))
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{name!r} is no file below the arrays")
            found[text] = _Range(name, int(offset), int(offset) + int(length))
    return found


def _joined(parts: Iterable[_Range]) -> list[_Range]:
    """Join nearby ranges for fewer requests, and split ranges that are too large for one."""
    joined: list[_Range] = []
    for part in sorted(set(parts)):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.file == part.file
            and part.start <= last.stop + _GAP_BYTES
            and part.stop - last.start <= _REQUEST_BYTES
        ):
            joined[-1] = _Range(last.file, last.start, max(last.stop, part.stop))
        else:
            joined.append(part)
    return [
        _Range(part.file, start, min(start + _REQUEST_BYTES, part.stop))
        for part in joined
        for start in range(part.start, part.stop, _REQUEST_BYTES)
    ]


def _batches(parts: Sequence[_Range]) -> Generator[list[_Range]]:
    """Group ranges that are in memory together while they are copied from the store to disk."""
    batch: list[_Range] = []
    for part in parts:
        batch.append(part)
        if sum(each.stop - each.start for each in batch) >= 4 * _REQUEST_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _read(path: AnyPath, parts: Sequence[_Range]) -> dict[_Range, bytes]:
    contents = at_once(lambda part: read_any(path / part.file, part.start, part.stop), parts)
    for part, content in zip(parts, contents, strict=True):
        if len(content) != part.stop - part.start:
            raise ValueError(f"{path / part.file} ends before byte {part.stop}")
    return dict(zip(parts, contents, strict=True))


def _fill(folder: Path, contents: Mapping[_Range, bytes]) -> None:
    """Write ranges of files; raises StoreError if the temporary directory has no room."""
    try:
        for part, content in contents.items():
            file = folder / part.file
            file.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(number, "wb") as handle:
                handle.seek(part.start)
                handle.write(content)
    except OSError as error:
        text = f"{error.strerror} in the temporary directory"
        raise StoreError(error.errno, text, str(folder)) from error
