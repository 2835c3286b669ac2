"""Writing and reading of global arrays. All calls of Orbax are in this module.

Orbax is imported inside the functions, not at the top. Its import takes longer than the rest of
jaxpipe's imports, and it adds a handler to the root logger, after which a program's own
`logging.basicConfig` would have no effect.
"""

import functools
import hashlib
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.files import lacks_descriptors
from jaxpipe._util.stores import AnyPath, StoreError
from jaxpipe.errors import CheckpointError

from ._index import StoredArray
from ._staging import Arrays, check_arrays, num_written, to_finish, to_write
from ._storage import repair

_LOGGER = logging.getLogger("jaxpipe")
_WRITE_BYTES = 128 << 20
"""Largest total size of buffers while writing."""
_FILE_BYTES = 256 << 20
_OVERHEAD_BYTES = 64 << 20
"""Upper bound on the size of a file beyond the total size of the arrays."""
_READ_BYTES = 256 << 20
"""Bytes read at a time, unless one array is larger."""


def write_arrays(path: AnyPath, arrays: Mapping[str, jax.Array]) -> int:
    """Write this process's blocks of global arrays; return the number of chunks it has written.

    The arrays must not change until this returns. `path` is a folder that all processes see;
    `finish_arrays` combines their blocks.
    """
    ocp = _orbax()
    full = {name: array for name, array in arrays.items() if array.size}
    # The tree handler instead of Orbax's `save`, which synchronises the processes: if storage
    # failed in one process, the others would block.
    args = ocp.args.PyTreeSave(full, ocdbt_target_data_file_size=_FILE_BYTES)
    with to_write(path) as folder:
        _writer().save(_orbax_path(folder), args=args)
        return num_written(folder, jax.process_index())


def finish_arrays(path: AnyPath, arrays: Mapping[str, jax.Array], num_chunks: int) -> None:
    """Make the arrays readable once all processes have written; only one process calls this.

    Raises OSError unless a reader finds the chunks that all processes have written, and each
    block of each array.
    """
    with to_finish(path) as folder:
        _writer().finalize(_orbax_path(folder))
    blocks = {name: math.prod(grid_of(array)) for name, array in arrays.items() if array.size}
    check_arrays(path, num_chunks, blocks)


def _orbax_path(path: Path) -> Any:
    from etils import epath

    return epath.Path(path.absolute())


def _writer() -> Any:
    ocp = _orbax()
    # No array metadata store: process 0 would make its folder, and the other processes would wait
    # up to ten minutes for it.
    handler = ocp.type_handlers.ArrayHandler(array_metadata_store=None)
    impl = ocp.BasePyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, handler)),
        save_concurrent_bytes=_WRITE_BYTES,
        use_zarr3=True,
        use_compression=False,  # random mantissas do not compress, and every byte is hashed anyway
    )
    return ocp.PyTreeCheckpointHandler(handler_impl=impl)


def read_arrays(
    path: AnyPath, arrays: Mapping[str, StoredArray], rows: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, np.ndarray]]:
    """Read global arrays into host memory, a few at a time, by name, and check their content.

    `arrays` describes all arrays in the folder. `rows` names those to read, and the rows that will
    be used, whose hashes are checked.
    """
    empty = [name for name in rows if not arrays[name].num_bytes]
    if empty:
        yield {name: np.zeros(arrays[name].shape, jnp.dtype(arrays[name].dtype)) for name in empty}
    nonempty = {name: array for name, array in arrays.items() if array.num_bytes}
    source = Arrays(path)
    for names in _batches(nonempty, {name: None for name in rows if name in nonempty}):
        try:
            with source.holding(names) as folder:
                _check_files(
                    folder, sum(array.num_bytes for array in nonempty.values()) + _OVERHEAD_BYTES
                )
                found = _read(folder, {name: nonempty[name] for name in names})
        except Exception as error:  # the libraries raise many types for damaged files
            if isinstance(error, StoreError) or lacks_descriptors(error):
                raise CheckpointError(
                    f"{path} must be readable, but got {_first_line(error)}. "
                    f"{repair(path, 'Check it', error)}, and load again."
                ) from error
            make_bare(error)
            raise CheckpointError(
                f"{path} must hold the arrays as they were written, but reading {names[0]} and the "
                f"{len(names) - 1} after it failed with {type(error).__name__}: "
                f"{_first_line(error)}. The files are damaged or missing: load another tag, or "
                "restore them."
            ) from error
        read = {name: np.asarray(found[name]) for name in names}
        del found
        for name, array in read.items():
            for row in sorted(set(rows[name])):
                if is_damaged(arrays[name], array, row):
                    raise CheckpointError(
                        f"{path} must hold the arrays as they were written, but row {row} of "
                        f"{name} has another sha256 than the index says: it is damaged. Load "
                        "another tag, or restore the files."
                    )
        yield read


def _check_files(path: Path | str, most_bytes: int) -> None:
    """Refuse files that would block a reader: pipes, and files larger than all that was written."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir():
                _check_files(entry.path, most_bytes)
            elif not entry.is_file() or entry.stat().st_size > most_bytes:
                raise OSError(f"{entry.path} is not a file, or has {entry.stat().st_size} bytes")


def hash_blocks(arrays: Mapping[str, jax.Array]) -> dict[str, dict[int, list[str]]]:
    """Hash every copy of this process's blocks, in hexadecimal, by array name and block number.

    Equal copies of a block have one hash. Block numbers are as for `StoredArray`.
    """
    found: dict[str, dict[int, list[str]]] = {}
    for name, array in arrays.items():
        # Orbax chooses which copy it writes.
        copies: dict[int, list[Any]] = {}
        for shard in array.addressable_shards:
            copies.setdefault(_number(array, shard.index), []).append(shard)
        found[name] = {number: _hashes(shards) for number, shards in copies.items()}
    return found


def _hashes(copies: Sequence[Any]) -> list[str]:
    first = _bytes(copies[0].data)
    # Comparing is much faster than hashing. Bytes are compared, so that a NaN equals itself.
    others = [copy for copy in copies[1:] if not np.array_equal(_bytes(copy.data), first)]
    return [_hash(first), *sorted({_hash(np.asarray(copy.data)) for copy in others})]


def grid_of(array: jax.Array) -> tuple[int, ...]:
    """Return the number of blocks into which the devices divide an array along each dim."""
    return tuple(
        n // max(size, 1) or 1 for n, size in zip(array.shape, _block_shape(array), strict=True)
    )


def is_damaged(stored: StoredArray, array: np.ndarray, row: int) -> bool:
    """Whether a row differs from what was written."""
    return any(_hash(array[row][at]) != stored.sha256[number] for number, at in stored.blocks(row))


def _number(array: jax.Array, index: tuple[slice, ...]) -> int:
    at = [
        (i.start or 0) // max(size, 1) for i, size in zip(index, _block_shape(array), strict=True)
    ]
    return int(np.ravel_multi_index(at, grid_of(array))) if at else 0


def _block_shape(array: jax.Array) -> tuple[int, ...]:
    return array.sharding.shard_shape(array.shape)


def _hash(block: np.ndarray) -> str:
    return hashlib.sha256(_bytes(block).data).hexdigest()


def make_bare(error: BaseException) -> None:
    """Remove the hundreds of lines of Orbax from an error's traceback, and log them."""
    # Storage does not raise these types, so they are worth a warning.
    is_fault = isinstance(error, LookupError | TypeError | AttributeError)
    _LOGGER.log(logging.WARNING if is_fault else logging.DEBUG, "Orbax failed", exc_info=error)
    error.__cause__ = error.__context__ = error.__traceback__ = None


@functools.cache
def _orbax() -> Any:
    """Import Orbax and keep it from printing errors."""
    # The names of Orbax's first API, which 1.0 gives to another: `pyproject.toml` excludes it.
    import orbax.checkpoint as ocp

    # An error in a thread of Orbax is raised here and reported once. Every thread would also print
    # its own error, and so would the threads that Orbax abandons after the first failure. In an
    # outage these are a thousand lines around the one that matters.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_news)
    show = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        is_late = isinstance(error, RuntimeError) and unraisable.object is None
        # The finaliser of an event loop that could not be made: no file descriptor was free.
        is_unmade = isinstance(error, AttributeError) and error.name == "_ssock"
        if is_unmade or (is_late and str(error) == "Event loop is closed"):
            _LOGGER.debug("a write ended after its save: %s", error)
        else:
            show(unraisable)

    sys.unraisablehook = hook
    warnings.filterwarnings("ignore", "coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    return ocp


def _bytes(block: Any) -> np.ndarray:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _read(path: Path, arrays: Mapping[str, StoredArray]) -> Mapping[str, np.ndarray]:
    """Read whole arrays, in this process only."""
    # The tree handler instead of Orbax's `load`, which synchronises all processes of the job. Each
    # process reads only what it needs, which may be nothing, and a single process may read a
    # checkpoint by itself.
    ocp = _orbax()
    like = {name: _like(array) for name, array in arrays.items()}
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in arrays}
    args = ocp.args.PyTreeRestore(item=like, restore_args=as_numpy, partial_restore=True)
    found: Mapping[str, np.ndarray] = ocp.PyTreeCheckpointHandler().restore(
        _orbax_path(path), args=args
    )
    for name, array in arrays.items():
        if (found[name].shape, found[name].dtype.name) != (array.shape, array.dtype):
            raise ValueError(f"{name} is {found[name].dtype.name}{list(found[name].shape)}")
    return found


def _is_news(record: logging.LogRecord) -> bool:
    """Filter log records: drop exceptions that were raised inside Orbax."""
    error = record.exc_info[1] if record.exc_info else None
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    if not any("/orbax/" in frame.filename for frame in frames):
        return True
    _LOGGER.debug("%s", record.getMessage())
    return False


def _like(array: StoredArray) -> np.ndarray:
    # Gives Orbax a shape and a dtype, with memory for only one element.
    return np.broadcast_to(np.zeros((), jnp.dtype(array.dtype)), array.shape)


def _batches(arrays: Mapping[str, StoredArray], names: Mapping[str, Any]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name in names:
        if batch and size + arrays[name].num_bytes > _READ_BYTES:
            yield batch
            batch = []
            size = 0
        batch.append(name)
        size += arrays[name].num_bytes
    if batch:
        yield batch


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
