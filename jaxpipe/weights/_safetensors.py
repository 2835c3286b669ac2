"""Writing and reading of safetensors files, which many other libraries read.

Files are read with the safetensors library. They are written by this module, tensor by tensor,
because the library needs all tensors of a file in memory.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from safetensors import safe_open

from jaxpipe._util.files import (
    PARTIAL,
    advice,
    check_is_file,
    new_beside,
    open_to_append,
    open_to_change,
    parse_json,
    sync,
    write_file,
)
from jaxpipe._util.paths import any_path, read_any, readable
from jaxpipe._util.stores import AnyPath, StorePath, at_once, staging_folder, upload
from jaxpipe.errors import CheckpointError, shown
from jaxpipe.layers import split_path, unflatten_dict

from ._on_store import DTYPES, StoreTensors

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = _SUFFIX + ".index.json"
_SHARD = re.compile(r"-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_RESTORE = "It is missing, damaged, or of another kind: restore it, or export again"
_PARAMS = "params/"
_COLLECTIONS = "collections/"
_DEEPEST = 100
"""Largest number of parts of a path in a tree, because tree functions recurse at each part."""


@dataclass(frozen=True)
class _File:
    """A safetensors file to write, with the offset of each tensor in it, and the bytes of all."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    size: int


def check_shard_size(max_shard_bytes: int | None) -> None:
    """Refuse a largest size of shards that is not positive; None means no limit."""
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(
            f"max_shard_bytes must be at least 1, but got max_shard_bytes={max_shard_bytes}. Write "
            "for instance 5_000_000_000, or None for one file."
        )


def write_safetensors(
    source: AnyPath,
    target: AnyPath,
    tensors: Mapping[str, jax.ShapeDtypeStruct],
    values: Iterable[tuple[str, np.ndarray]],
    metadata: Mapping[str, str],
    max_shard_bytes: int | None,
    beside: Mapping[str, bytes] | None = None,
) -> list[AnyPath]:
    """Write tensors to one file, or to several files and an index; returns paths, the index last.

    Files get their final names once all of them are complete. For a store, they are written in the
    temporary directory and then uploaded; no other process may write them meanwhile.

    Names of shards and of the index are derived from `target`. `tensors` are in the order in which
    shards are filled, `values` in any order; each is written before the next is requested. `beside`
    are contents of further files in the folder, which exist only while the tensors are complete.
    `source` is for error messages.
    """
    for name, tensor in tensors.items():
        if tensor.dtype.name not in DTYPES:
            raise CheckpointError(
                f"{source} must hold dtypes that safetensors supports, but got {name!r} of "
                f"dtype={tensor.dtype.name}. Read it with load_params and convert it, or leave it "
                "in the checkpoint."
            )
    shards = _split(tensors, max_shard_bytes)
    files = [
        _lay_out(_shard_name(target.name, i, len(shards)), shard, metadata)
        for i, shard in enumerate(shards)
    ]
    index = target.name.removesuffix(_SUFFIX) + _INDEX_SUFFIX
    # Readers look for these files first. They are removed while the shards change, and written
    # again once all shards are complete.
    last = dict(beside or {})
    if len(files) > 1:
        last[index] = _dump_weight_map(files, tensors)
    gone = {index, *last}
    try:
        if isinstance(target, StorePath):
            _write_to_store(target, files, values, gone, last)
        else:
            _write_to_folder(target, files, values, gone, last)
    except OSError as error:
        raise CheckpointError(
            f"out must be a file that can be written, but got out={str(target)!r} and "
            f"{error.strerror or error}. Make room, check the folder's permissions, or choose "
            "another."
        ) from error
    return [target.with_name(name) for name in (*(file.name for file in files), *last)]


def _write_to_folder(
    target: Path,
    files: Sequence[_File],
    values: Iterable[tuple[str, np.ndarray]],
    gone: Iterable[str],
    last: Mapping[str, bytes],
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(target):
        _check_others(target, files, last)
        _remove_leftovers(target)
        with contextlib.ExitStack() as stack:
            partials = {
                file.name: stack.enter_context(new_beside(target.with_name(file.name)))
                for file in files
            }
            _write(files, partials, values)
            for name in gone:
                target.with_name(name).unlink(missing_ok=True)
            for name, partial in partials.items():
                partial.replace(target.with_name(name))
        for name, content in last.items():
            write_file(target.with_name(name), content)
        sync([target.parent])


def _write_to_store(
    target: StorePath,
    files: Sequence[_File],
    values: Iterable[tuple[str, np.ndarray]],
    gone: Iterable[str],
    last: Mapping[str, bytes],
) -> None:
    # Tensors come in any order, but an object must be written from beginning to end.
    _check_others(target, files, last)
    with staging_folder() as folder:
        partials = {file.name: folder / file.name for file in files}
        for partial in partials.values():
            partial.touch()
        _write(files, partials, values)
        for name in gone:
            target.with_name(name).unlink(missing_ok=True)
        for name, partial in partials.items():
            upload(partial, target.with_name(name))
    for name, content in last.items():
        target.with_name(name).write_bytes(content)


def load_safetensors(
    path: str | PathLike[str] | StorePath, part: Literal["params", "collections"] = "params"
) -> dict[str, Any]:
    """Read the files of `export_safetensors`, or similar files from elsewhere.

    Args:
        path: A file, the index of shards, or a folder with one of these, on a file system or a
            store. If a folder has several, the one named `model` is read, as in `transformers`.
        part: `"params"` reads the parameters, as `load_params` returns them. `"collections"` reads
            the collections, as `load_collections` returns them.

    Returns:
        Nested dictionaries of NumPy arrays. Names are split at slashes, and `%2F` in a name is a
        slash in a key.

    Raises:
        CheckpointError: A file is missing, is not a safetensors file, or has a dtype that NumPy
            does not support; the index names a file in another folder, or the wrong file for a
            tensor; a tensor is in two shards; or a tensor's name is a prefix of another's path.
    """
    if part not in ("params", "collections"):
        raise CheckpointError(
            f"part must be 'params' or 'collections', but got part={part!r}. Write one of these."
        )
    found: dict[str, np.ndarray] = {}
    for file, names in safetensors_files(any_path(path, "path")).items():
        wanted = [
            name for name in names if name.startswith(_COLLECTIONS) == (part == "collections")
        ]
        with open_safetensors(file) as tensors:
            found.update({name: _tensor(tensors, name) for name in wanted})
    paths = {split_path(name): name for name in sorted(found)}
    for name in found:
        each = split_path(name)
        if len(each) > _DEEPEST:
            raise CheckpointError(
                f"{path} must name tensors by paths of at most {_DEEPEST} parts, but got "
                f"{shown(name)} of {len(each)}. Rename it."
            )
        others = [
            paths[each[:i]] for i in range(1, len(each) + 1) if paths.get(each[:i], name) != name
        ]
        if others:
            raise CheckpointError(
                f"{path} must name tensors by paths in a tree, but got {others[0]!r} and {name!r}. "
                "Rename the first."
            )
    prefix = 1 if part == "collections" else 0
    return unflatten_dict({each[prefix:]: found[name] for each, name in paths.items()})


def _tensor(tensors: Any, name: str) -> np.ndarray:
    part = tensors.get_slice(name)
    # The library's `get_tensor` panics, instead of raising an error, if memory does not suffice,
    # and it slices no empty tensors.
    return tensors.get_tensor(name) if 0 in part.get_shape() else part[...]


def check_target(out: AnyPath) -> AnyPath:
    """Return the path of a safetensors file to write; refuses folders and other suffixes."""
    with readable(out):
        is_folder = out.is_dir()
    if not out.name.endswith(_SUFFIX) or out.name == _SUFFIX or is_folder:
        example = (
            out / "model.safetensors"
            if is_folder
            else out.with_name((out.name or "model") + _SUFFIX)
        )
        raise CheckpointError(
            f"out must be the name of a file that ends in {_SUFFIX!r}, but got out={str(out)!r}. "
            f"Write for instance {str(example)!r}."
        )
    return out


def _num_bytes(tensor: jax.ShapeDtypeStruct) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _split(
    tensors: Mapping[str, jax.ShapeDtypeStruct], limit: int | None
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    shards: list[dict[str, jax.ShapeDtypeStruct]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = _num_bytes(tensor)
        if shards[-1] and limit is not None and size + num_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _shard_name(name: str, number: int, count: int) -> str:
    stem = name.removesuffix(_SUFFIX)
    return name if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{_SUFFIX}"


def _lay_out(
    file_name: str, tensors: Mapping[str, jax.ShapeDtypeStruct], metadata: Mapping[str, str]
) -> _File:
    """Lay out tensors in a file, widest dtypes first, so that all tensors are aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offsets: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets[name], end = end, end + _num_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces are part of the header, and let the tensors begin at a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    starts = {name: begin + offset for name, offset in offsets.items()}
    return _File(file_name, struct.pack("<Q", len(text)) + text, starts, begin + end)


def _check_others(target: AnyPath, files: Sequence[_File], last: Iterable[str]) -> None:
    """Refuse to write if other files of an older export with this name would remain."""
    # Readers could not tell which export is meant.
    written = {*(file.name for file in files), *last}
    stem = target.name.removesuffix(_SUFFIX)
    others = sorted(
        path.name
        for path in target.parent.iterdir()
        if path.name.startswith(stem)
        and path.name not in written
        and (
            path.name in (target.name, stem + _INDEX_SUFFIX)
            or _SHARD.fullmatch(path.name.removeprefix(stem))
        )
    )
    if others:
        listed = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        raise CheckpointError(
            f"out must be a name without an export in other files, but got out={str(target)!r} "
            f"next to {listed}. Remove these files, or choose another name."
        )


@contextlib.contextmanager
def _claimed(target: Path) -> Generator[None]:
    """Claim a file for writing; refuse it if another process is writing it."""
    path = target.with_name(f".{target.name}.writing")
    # A claim by a lock ends with its process, even if the process is killed.
    with open_to_append(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous owner may have ended and removed the file after it was opened here.
            is_own = path.exists() and os.path.samestat(os.fstat(handle.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_own = False
        except OSError:  # a file system without locks
            is_own = True
        if not is_own:
            raise CheckpointError(
                f"out must be written by one process at a time, but got out={str(target)!r}, which "
                "another is writing. Call it in only one process, or write to another file."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    """Remove files that a killed export to this name left."""
    stem = re.escape(target.name.removesuffix(_SUFFIX))
    left = re.compile(
        rf"\.{stem}({_SHARD.pattern}|{re.escape(_SUFFIX)})\.[0-9a-f]{{16}}{re.escape(PARTIAL)}"
    )
    for path in target.parent.iterdir():
        if left.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _write(
    files: Sequence[_File],
    partials: Mapping[str, Path],
    values: Iterable[tuple[str, np.ndarray]],
) -> None:
    for file in files:
        with open_to_change(partials[file.name]) as handle:
            handle.write(file.header)
            # At full length at once, because tensors come in any order.
            handle.truncate(file.size)
    file_of = {name: file for file in files for name in file.starts}
    for name, value in values:
        file = file_of[name]
        with open_to_change(partials[file.name]) as handle:
            handle.seek(file.starts[name])
            # As bytes, because arrays of bfloat16 are no buffers for Python.
            handle.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    for partial in partials.values():
        with open_to_change(partial) as handle:
            os.fsync(handle.fileno())


def _dump_weight_map(files: Sequence[_File], tensors: Mapping[str, jax.ShapeDtypeStruct]) -> bytes:
    weight_map = {name: file.name for file in files for name in file.starts}
    total = sum(_num_bytes(tensor) for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


def _resolve(path: AnyPath) -> AnyPath:
    """Return the file or index that a path refers to."""
    if not path.is_dir():
        return path
    names = sorted(each.name for each in path.iterdir())
    # Prefer these names, as `transformers` does: other files in a model's folder may be its weights
    # in another form, or an adapter.
    for name in ("model" + _SUFFIX, "model" + _INDEX_SUFFIX):
        if name in names:
            return path / name
    found = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    found += [name for name in names if name.endswith(_SUFFIX) and not _SHARD.search(name)]
    if len(found) != 1:
        raise CheckpointError(
            "path must be a folder with one safetensors file or one index of shards, but got "
            f"path={str(path)!r} with {', '.join(found) or 'none'}. Pass the path of the file "
            "itself."
        )
    return path / found[0]


def safetensors_files(path: AnyPath) -> dict[AnyPath, list[str]]:
    """Names of tensors by file, for a file, the index of shards, or a folder with one of these."""
    with readable(path):
        return _files(_resolve(path))


def _files(path: AnyPath) -> dict[AnyPath, list[str]]:
    if not path.name.endswith(".json"):
        return {path: _names_in(path, path.name)}
    listed = _read_weight_map(path)
    homes: dict[str, str] = {}
    found: dict[AnyPath, list[str]] = {}
    shards = list(dict.fromkeys(listed.values()))
    for shard, names in zip(
        shards, at_once(lambda each: _names_in(path, each), shards), strict=True
    ):
        found[path.with_name(shard)] = names
        for name in names:
            if name in homes:
                raise _disagreement(path, f"{name!r} in both {homes[name]} and {shard}")
            homes[name] = shard
    for name in sorted({*listed, *homes}):
        if listed.get(name) != homes.get(name):
            there = listed.get(name, "no place")
            here = homes.get(name, "no shard")
            text = f"{name!r} at {there}, while it is in {here}"
            raise _disagreement(path, text)
    return found


def _names_in(index: AnyPath, shard: str) -> list[str]:
    with open_safetensors(index.with_name(shard)) as tensors:
        return list(tensors.keys())


def _disagreement(path: AnyPath, text: str) -> CheckpointError:
    return CheckpointError(
        f"{path} must give each tensor the one shard that holds it, but got {text}. The files are "
        "not of one export: restore them, or export again."
    )


def _read_weight_map(path: AnyPath) -> dict[str, str]:
    try:
        found = parse_json(read_any(path))["weight_map"]
        is_map = bool(found) and all(isinstance(shard, str) for shard in found.values())
    except OSError as error:
        raise CheckpointError(
            f"{path} must be a readable file, but got {error.strerror or error}. Check the path, "
            "or restore the file."
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError):
        is_map = False
        found = {}
    if not is_map:
        raise CheckpointError(
            f"{path} must be the index of shards, with their names in 'weight_map', but got "
            "something else. Pass <name>.safetensors.index.json."
        )
    beside: dict[str, AnyPath] = {}
    with contextlib.suppress(OSError):  # not every folder and not every server can be listed
        beside.update({each.name: each for each in path.parent.iterdir()})
    for shard, name in {shard: name for name, shard in reversed(found.items())}.items():
        if (
            Path(shard).name != shard
            or "\\" in shard
            or "\0" in shard
            or not shard.endswith(_SUFFIX)
        ):
            raise CheckpointError(
                f"{path} must name safetensors files in its own folder, but got "
                f"weight_map[{name!r}]={shard!r}. Write its plain name, and put the file there."
            )
        there = beside.get(shard, path.with_name(shard))
        if there.is_dir() or (shard not in beside and not there.exists()):
            raise CheckpointError(
                f"{path} must name safetensors files in its own folder, but got "
                f"weight_map[{name!r}]={shard!r}, which is missing. Restore it, or export again."
            )
    return found


@contextlib.contextmanager
def open_safetensors(path: AnyPath) -> Generator[Any]:
    """Open a file; errors while reading it are raised as CheckpointError."""
    try:
        if isinstance(path, StorePath):
            yield StoreTensors(path)
            return
        check_is_file(path)
        path.open("rb").close()  # the library reports a file that it cannot open as missing
        with safe_open(str(path), framework="numpy") as tensors:
            dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
            # The library makes no NumPy arrays of this dtype.
            yield StoreTensors(path) if "F8_E4M3" in dtypes else tensors
    except MemoryError as error:
        raise CheckpointError(
            f"{path} must hold tensors that fit into this machine's memory, but they do not. Read "
            "it on a machine with more memory, or check who wrote it."
        ) from error
    except (
        Exception
    ) as error:  # the library's errors for damaged files, and numpy's for unknown dtypes
        raise CheckpointError(
            f"{path} must be a safetensors file with dtypes of numpy or bfloat16, but got "
            f"{type(error).__name__}: {error}. {advice(error, _RESTORE)}."
        ) from error
