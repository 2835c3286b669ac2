"""Writing of checkpoints, one at a time, in the foreground or in the background."""

import atexit
import contextlib
import datetime
import hashlib
import json
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.exit import before_exit, fail_at_exit
from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import AnyPath, StoreError, StorePath
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import Leaf, TrainState, state_arrays
from jaxpipe.distributed import gather_texts, log, run_on_all
from jaxpipe.distributed.topology import mesh_shape
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import join_path

from ._copies import Hashes, merge_hashes
from ._describe import adapter_keys, describe_layers, dump_scalars, library_versions, scalar_arrays
from ._directory import (
    ARRAYS,
    COMMIT,
    Commit,
    check_tag,
    commit,
    look_over,
    make_data,
    next_sequence,
    read_commit,
    read_latest,
    remove_data,
    remove_old,
    step_tag,
)
from ._folder_lock import FolderLock
from ._index import INDEX, Index, StoredArray, dump_index
from ._json import check_json, dump_json
from ._lock import Lock
from ._object_lock import ObjectLock
from ._reports import collect, remove_reports, report, still_writing
from ._storage import (
    NotSyncedError,
    link_of,
    make_folder,
    repair,
    replace_file,
    sync_tree,
    try_to_remove,
)
from ._store import finish_arrays, grid_of, hash_blocks, make_bare, write_arrays
from ._struct import dump_struct

_CLEANING_S = 10.0
_QUIET_POLLS = 50
_QUIET_PAUSE_S = 0.01
"""Seconds to keep removing data of a failed save, and how often in a row it must be found gone."""


@dataclass(frozen=True)
class RunState:
    """State of a run that is not in its `TrainState`.

    Attributes:
        global_steps: Batches trained.
        global_samples: Samples trained.
        data_iterator: State of this process's data iterator, as returned by `encode_state`. None if
            it has no state.
        client_state: The caller's own state, as JSON values.
        config: The configuration, as JSON values.
    """

    global_steps: int
    global_samples: int = 0
    data_iterator: Any = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """A checkpoint that is being written."""

    lock: Lock | None
    save_dir: AnyPath
    tag: str
    sequence: int
    data: AnyPath
    arrays: Mapping[str, jax.Array]
    scalars: Mapping[str, jax.Array]
    leaves: Mapping[str, Leaf]
    content: Mapping[str, Any]
    save_latest: bool


class CheckpointWriter:
    """Writes the checkpoints of one run.

    A lock ensures that only one job saves to a directory, from its first save there until its runs
    are deleted or its program ends. Leftovers of unfinished saves are removed.

    Args:
        keep_last: Number of checkpoints with tags of the form `global_step<N>` to keep. None keeps
            all.
        keep_every: Also keep checkpoints whose N is a multiple of this.
    """

    def __init__(self, keep_last: int | None = None, keep_every: int | None = None) -> None:
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._ended = threading.Event()
        self._ended.set()
        self._error: Exception | None = None
        self._is_waited_for = False

    def save(
        self,
        save_dir: str | PathLike[str] | StorePath,
        pipeline: Pipeline,
        state: TrainState,
        run: RunState,
        *,
        tag: str | None = None,
        save_latest: bool = True,
        background: bool = False,
        exclude_frozen: bool = False,
    ) -> AnyPath:
        """Write a checkpoint; all processes must call this.

        Args:
            save_dir: The directory of checkpoints, on a file system or an object store that all
                processes see. It is created if it does not exist.
            pipeline: The pipeline that the state belongs to.
            state: The state to write. Training steps may donate it as soon as the call returns.
            run: The rest of the run's state.
            tag: Name of the checkpoint. None means `global_step<N>`. An existing checkpoint with
                this tag is replaced atomically, at the end of the save.
            save_latest: Whether the checkpoint can be found without its tag.
            background: Whether to return as soon as later steps cannot change what is saved, and
                write while training continues.
            exclude_frozen: Whether to leave out frozen parameters. Such a checkpoint can be loaded
                only into an engine that has these parameters already.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: The tag is invalid, is a link, or differs between processes; `run`
                contains values that JSON does not support; another job saves there; the directory
                cannot be written; or the last save in the background failed. No checkpoint has
                changed.
        """
        folder = any_path(save_dir, "save_dir")
        self.wait()
        tag = self._agreed_tag(step_tag(run.global_steps) if tag is None else tag)
        # Everything that can be refused is refused before anything is locked or written.
        run_on_all(lambda: _check_client_state(run.client_state))
        hold = _snapshot if background else dict
        leaves, arrays = _chosen(pipeline, state, exclude_frozen=exclude_frozen)
        iterators = [json.loads(text) for text in gather_texts(json.dumps(run.data_iterator))]
        made = run_on_all(lambda: _prepare(folder, tag), who=[0])
        try:
            data, sequence = gather_texts("" if made is None else f"{made.data} {made.sequence}")[
                0
            ].split()

            def new_job() -> _Job:
                with _told(folder):
                    return _Job(
                        lock=None if made is None else made.lock,
                        save_dir=folder.absolute(),
                        tag=tag,
                        sequence=int(sequence),
                        data=_checked_data(folder.absolute() / tag / data, folder),
                        arrays=hold(arrays),
                        scalars=hold(scalar_arrays(pipeline, state)),
                        leaves=leaves,
                        content=_content(pipeline, run, iterators, leaves),
                        save_latest=save_latest,
                    )

            job = run_on_all(new_job)
            finish = partial(
                _finish, cast("_Job", job), self._keep_last, self._keep_every, background=background
            )
        except BaseException:
            if made is not None:
                made.lock.end_save(self, is_kept=False)
            raise
        del job
        lock = None if made is None else made.lock
        if background:
            self._start(finish, lock, f"save {tag}")
        else:
            self._run(finish, lock)
            self.wait()
        return folder / tag

    def _start(self, finish: Callable[[], None], lock: Lock | None, name: str) -> None:
        """Finish a save in the background."""
        self._finish_at_exit()
        self._ended.clear()
        thread = threading.Thread(target=self._run, args=(finish, lock), name=name)
        thread.start()
        if (3, 12) <= sys.version_info < (3, 12, 2):
            # These versions start no thread once the main thread has ended (CPython gh-113964), but
            # Orbax starts some.
            thread.join()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; all processes must call this.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        self._ended.wait()
        error = self._error
        self._error = None
        run_on_all(lambda: _raise(error))

    def _agreed_tag(self, tag: Any) -> str:
        run_on_all(lambda: check_tag(tag))
        tags = gather_texts(tag)
        if len(set(tags)) > 1:
            named = ", ".join(f"process {i}: {each!r}" for i, each in enumerate(tags))
            raise CheckpointError(
                f"tag must be the same on all processes, but got {named}. Nothing was written: "
                "make it from a value that all processes share, such as the step."
            )
        return tag

    def _finish_at_exit(self) -> None:
        """Make the interpreter wait for background saves at exit, and fail if one failed."""
        if self._is_waited_for:
            return
        self._is_waited_for = True
        reference = weakref.ref(self)

        def report() -> None:
            writer = reference()
            if writer is not None and writer._error is not None:
                fail_at_exit(writer._error)

        before_exit(self._ended.wait, "a checkpoint was written in the background, which is lost")
        atexit.register(report)

    def _run(self, finish: Callable[[], None], lock: Lock | None) -> None:
        """Finish a save; `wait` raises what failed, on all processes."""
        is_saved = False
        try:
            finish()
            is_saved = True
        # Catch every exception: a save whose failure is not reported would count as successful.
        except Exception as error:  # noqa: BLE001
            self._error = error
            if threading.current_thread() is not threading.main_thread():
                # Not with `log`, which logs only in process 0.
                logging.getLogger("jaxpipe").error("%s", error)
        finally:
            if lock is not None:
                lock.end_save(self, is_kept=is_saved)
            self._ended.set()


def _finish(job: _Job, keep_last: int | None, keep_every: int | None, *, background: bool) -> None:
    """Write the checkpoint; every process runs it."""
    started = time.perf_counter()
    is_there = False
    may_come = False
    # In a background thread, a process can report a failure only through files. In the foreground,
    # all processes learn of it immediately.
    write = partial(_write, job)
    failed = _caught(write if background else lambda: run_on_all(write))
    if failed is not None and background:
        _caught(lambda: report(job.data, error=_first_line(failed)))
    elif failed is None and job.lock is not None:
        failed = _caught(lambda: _commit(job, cast("Lock", job.lock)))
    if job.lock is not None and failed is None:
        _make_room(job, job.lock.known, keep_last, keep_every)
    elif job.lock is not None:
        is_commit = isinstance(failed, NotSyncedError | StoreError) and str(
            failed.filename
        ).endswith(f"/{COMMIT}")
        # A store that did not answer may have received the request, and may still commit.
        may_come = is_commit and isinstance(failed, StoreError)
        is_there = _clean_up(job, may_come=may_come) or (is_commit and not may_come)
    if failed is None:
        log(
            logging.INFO,
            "saved %s in %.1f s",
            job.save_dir / job.tag,
            time.perf_counter() - started,
        )
    elif isinstance(failed, KeyboardInterrupt | CheckpointError):
        raise failed
    else:
        make_bare(failed)
        raise _failure(job, failed, is_there=is_there, may_come=may_come) from failed


def _caught(action: Callable[[], object]) -> BaseException | None:
    """Run an action and return its exception; None if it succeeds."""
    try:
        action()
    # The libraries may raise any type; the caller reports it.
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _write(job: _Job) -> None:
    """Write this process's blocks, hash them at the same time, and report to process 0."""
    with still_writing(job.data), ThreadPoolExecutor(1) as pool:
        # Hashing releases the GIL.
        hashes = pool.submit(hash_blocks, {**job.arrays, **job.scalars})
        num_chunks = write_arrays(job.data / ARRAYS, job.arrays)
        sha256 = hashes.result()
    report(job.data, sha256=sha256, num_chunks=num_chunks)


def _commit(job: _Job, lock: Lock) -> None:
    """Combine what all processes wrote, and commit."""
    reports = collect(job.data, lock.check)
    finish_arrays(job.data / ARRAYS, job.arrays, sum(each.num_chunks for each in reports))
    content = dump_index(_index(job, [each.sha256 for each in reports]))
    # A commit names only data that is on disk. The order is: the arrays, the index with their
    # hashes, the folders' entries, and last, in `commit`, one small file. Before that file is
    # written the tag is missing; afterwards it is complete.
    replace_file(job.data / INDEX, content)
    remove_reports(job.data)
    # Orbax syncs only the arrays' values, but readers need its other files too.
    sync_tree(job.data)
    done = Commit(
        sequence=job.sequence,
        data=job.data.name,
        index_sha256=hashlib.sha256(content).hexdigest(),
        global_steps=job.content["global_steps"],
        is_latest=job.save_latest or read_latest(job.save_dir) == job.tag,
        saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    # Check the lock last: a job that took this one for dead may have begun to write, and only one
    # of the two may commit.
    lock.check()
    commit(job.save_dir, job.tag, done)
    lock.known[job.tag] = done


def _make_room(
    job: _Job, known: dict[str, Commit], keep_last: int | None, keep_every: int | None
) -> None:
    """Remove old checkpoints; the new one is already committed, so failures are only logged."""
    try:
        remove_data(job.data.parent, but=job.data.name)
        remove_old(job.save_dir, known, keep_last, keep_every)
    except (CheckpointError, OSError) as error:
        log(logging.WARNING, "saved %s, but old data stay: %s", job.save_dir / job.tag, error)


def _check_client_state(client_state: Any) -> None:
    if not isinstance(client_state, dict):
        raise CheckpointError(
            f"client_state must be a dictionary, but got a {type(client_state).__name__}. Pass for "
            "instance {'epoch': 3}, or leave it out."
        )
    check_json(client_state, "client_state")


@dataclass(frozen=True)
class _Prepared:
    """A directory that is ready for a save: it is locked, and the data's folder exists."""

    lock: Lock
    data: str
    sequence: int


def _prepare(save_dir: AnyPath, tag: str) -> _Prepared:
    """Remove leftovers and make the folder for the data."""
    with _told(save_dir):
        folder = save_dir / tag  # refused before anything is written if a store has no such name
        make_folder(save_dir)
        path = save_dir.absolute()
        is_store = isinstance(path, StorePath)
        lock = ObjectLock.begin_save(path) if is_store else FolderLock.begin_save(path)
        try:
            if link := link_of(folder):
                raise CheckpointError(
                    "tag must not be a link, which may lead to another run's checkpoint, but got "
                    f"tag={tag!r} in save_dir={str(save_dir)!r}, a link to "
                    f"{str(link)!r}. Remove the link, or choose another tag."
                )
            before = next_sequence(lock.known)  # a listing may leave out a tag by mistake
            for path in look_over(save_dir, lock.known):
                log(logging.INFO, "removed %s, which an unfinished save had left", path)
            sequence = max(before, next_sequence(lock.known))
            return _Prepared(lock, make_data(folder, sequence).name, sequence)
        except BaseException:
            lock.end_save(None, is_kept=False)
            raise


def _checked_data(data: AnyPath, save_dir: AnyPath) -> AnyPath:
    if data.is_dir():
        return data
    raise CheckpointError(
        f"save_dir must be a directory that all processes see, but got save_dir={str(save_dir)!r}, "
        f"in which process {jax.process_index()} does not find {data} that process 0 made. Pass an "
        "absolute path on a shared disk."
    )


@contextlib.contextmanager
def _told(save_dir: AnyPath) -> Generator[None]:
    """Convert errors of the file system to CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"save_dir must be a directory that can be written, but got save_dir={str(save_dir)!r} "
            f"and {error.strerror or error} at {error.filename}. "
            f"{repair(save_dir, 'Check its permissions', error)}, or choose another."
        ) from error


def _content(
    pipeline: Pipeline, run: RunState, iterators: list[Any], leaves: Mapping[str, Leaf]
) -> dict[str, Any]:
    """Return the parts of the index that do not depend on the devices' data."""
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), pipeline.batches.struct
    )
    return {
        "global_steps": run.global_steps,
        "global_samples": run.global_samples,
        "mesh": dict(mesh_shape(pipeline.mesh)),
        "zero_stage": pipeline.plan.config.zero_optimization.stage,
        "layers": describe_layers(pipeline, leaves),
        "excluded": tuple(key for key in pipeline.states.catalog if key not in leaves),
        "adapters": tuple(key for key in adapter_keys(pipeline) if key in leaves),
        "batch": dump_struct(tuple(batch)),
        "data_iterators": iterators,
        "client_state": json.loads(dump_json(dict(run.client_state))),
        "config": run.config,
        "versions": library_versions(),
    }


def _index(job: _Job, reports: list[Hashes]) -> Index:
    grids = {name: grid_of(array) for name, array in {**job.arrays, **job.scalars}.items()}
    hashes = merge_hashes(reports, grids, job.leaves)
    arrays = {}
    for name, array in job.arrays.items():
        grid = grids[name]
        sha256 = tuple(hashes[name][block] for block in range(math.prod(grid)))
        arrays[name] = StoredArray(tuple(array.shape), jnp.dtype(array.dtype).name, grid, sha256)
    return Index(leaves=job.leaves, arrays=arrays, scalars=dump_scalars(job.scalars), **job.content)


def _clean_up(job: _Job, *, may_come: bool) -> bool:
    """Remove the data of a failed save; return True, and keep it, if the commit had succeeded."""
    try:
        committed = read_commit(job.data.parent)
        if committed is not None and committed.data == job.data.name:
            return True
        if may_come:
            log(logging.WARNING, "%s is left for the next save to remove", job.data)
            return False
        # If one array cannot be written, Orbax abandons the writers of the others, which may
        # recreate folders, and does not report how many there are or when the last one ends. So
        # the data is removed until it stays away. The next save removes data that appears even
        # later, and all of it if storage does not answer now.
        num_quiet = 0
        deadline = time.monotonic() + _CLEANING_S
        while num_quiet < _QUIET_POLLS and time.monotonic() < deadline:
            num_quiet = 0 if job.data.exists() else num_quiet + 1
            try_to_remove(job.data)
            time.sleep(_QUIET_PAUSE_S)
        with contextlib.suppress(OSError):  # an earlier checkpoint of this tag has its own data
            job.data.parent.rmdir()
    except (CheckpointError, OSError) as error:
        log(
            logging.WARNING,
            "%s was not written, and is left for the next save to remove: %s",
            job.data,
            error,
        )
    return False


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _failure(job: _Job, error: BaseException, *, is_there: bool, may_come: bool) -> CheckpointError:
    path = job.save_dir / job.tag
    if is_there:
        return CheckpointError(
            f"{path} was written, but may be lost in a power failure: {_first_line(error)}. "
            "Check the file system, and save again."
        )
    if may_come:
        return CheckpointError(
            f"{path} may be written or not, for the store did not answer the last request: "
            f"{_first_line(error)}. If it is found, it is complete. Other checkpoints are "
            f"unchanged. {repair(path, '', error)}, and save again."
        )
    return CheckpointError(
        f"{path} could not be written: {_first_line(error)}. Earlier checkpoints are as they were. "
        f"{repair(path, 'Make room or check the file system', error)}, and save again."
    )


def _first_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _chosen(
    pipeline: Pipeline, state: TrainState, *, exclude_frozen: bool
) -> tuple[dict[str, Leaf], dict[str, jax.Array]]:
    """Return the leaves to write, and the arrays that hold them."""
    leaves = dict(pipeline.states.catalog)
    arrays = state_arrays(state)
    if not (exclude_frozen and pipeline.trace.frozen):
        return leaves, arrays
    for path in pipeline.trace.frozen:
        leaves.pop(join_path(("params", *path)), None)
    names = {span.array for leaf in leaves.values() for copy in leaf.copies for span in copy}
    return leaves, {name: array for name, array in arrays.items() if name in names}


def _snapshot(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy arrays to host memory, each row on the host of its device; blocks only for the copy."""
    # On CPU nothing is copied: as long as a view of a buffer exists, a step that the buffer is
    # donated to writes its results elsewhere.
    return {
        name: _view(array) if _is_on_host(array) else _copy(array) for name, array in arrays.items()
    }


def _is_on_host(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.sharding.device_set)


def _view(array: jax.Array) -> jax.Array:
    shards = [
        jax.device_put(np.asarray(shard.data), shard.device, may_alias=True)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _copy(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
