"""Writing checkpoints, one after another, in the foreground or in the background."""

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

from jaxpipe._exit import before_exit
from jaxpipe._paths import any_path
from jaxpipe._stores import AnyPath, StoreError, StorePath
from jaxpipe.distributed import gather_texts, log, run_on_all
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import join_path
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import Leaf, TrainState, state_arrays
from jaxpipe.topology import mesh_shape

from ._copies import Hashes, merge_hashes
from ._describe import describe_layers, dump_scalars, library_versions, scalar_arrays
from ._directory import (
    ARRAYS,
    COMMIT,
    Commit,
    check_tag,
    commit,
    make_data,
    next_sequence,
    read_commit,
    read_latest,
    remove_data,
    remove_leftovers,
    remove_old,
    sound_tags,
    step_tag,
)
from ._index import INDEX, Index, StoredArray, dump_index
from ._json import check_json, dump_json
from ._lock import DirectoryLock
from ._reports import collect, remove_reports, report, still_writing
from ._snapshot import snapshot
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

_CLEANING_S, _QUIET_POLLS, _QUIET_PAUSE_S = 10.0, 50, 0.01
"""Seconds to go on removing data of a failed save, and how often in a row they must be found gone.
"""


@dataclass(frozen=True)
class RunState:
    """State of a run beside its `TrainState`.

    Attributes:
        global_steps: Batches trained.
        global_samples: Samples trained.
        data_iterator: State of this process's data iterator, as `encode_state` gives it; None: it
            has none.
        client_state: What the caller wants to keep, as JSON knows it.
        config: The configuration, likewise.
    """

    global_steps: int
    global_samples: int = 0
    data_iterator: Any = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Job:
    """A checkpoint on its way to disk."""

    lock: DirectoryLock | None
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
    """Writes the states of one run.

    Only one job may save to a directory, from its first save there until its runs are deleted or
    its program ends, which a lock sees to. What unfinished saves left there is removed.

    Args:
        keep_last: How many checkpoints with tags of the form `global_step<N>` to keep; None: all.
        keep_every: Keep also those whose N is a multiple of this.
    """

    def __init__(self, keep_last: int | None = None, keep_every: int | None = None) -> None:
        self._keep_last, self._keep_every = keep_last, keep_every
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
        """Write a checkpoint; all processes call.

        Args:
            save_dir: The directory, made where it is not there; on a file system or an object store
                that all processes see.
            pipeline: What the state belongs to.
            state: What to write. Steps may donate it as soon as the call returns.
            run: What else to write.
            tag: Name of the checkpoint; None: `global_step<N>`. A tag that is there is replaced,
                whole, at the end.
            save_latest: Whether it is found without its tag.
            background: Return as soon as the state cannot change any more, and write while training
                goes on.
            exclude_frozen: Leave out parameters that are not trained; it opens where they are there
                already.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: The tag is no name, or not the same on all processes; `run` holds what
                JSON does not know; the tag is a link; another job saves there; the directory cannot
                be written; or the last save in the background failed. No checkpoint has changed.
        """
        folder = any_path(save_dir, "save_dir")
        self.wait()
        tag = self._agreed_tag(step_tag(run.global_steps) if tag is None else tag)
        # All that can be refused is, before anything is locked or written.
        run_on_all(lambda: _check_client_state(run.client_state))
        hold = snapshot if background else dict
        frozen = (
            {join_path(("params", *path)) for path in pipeline.trace.frozen}
            if exclude_frozen
            else set[str]()
        )
        leaves = {key: leaf for key, leaf in pipeline.catalog.items() if key not in frozen}
        names = {span.array for leaf in leaves.values() for copy in leaf.copies for span in copy}
        arrays = {
            name: array
            for name, array in state_arrays(state).items()
            if name in names or not frozen
        }
        iterators = [json.loads(text) for text in gather_texts(json.dumps(run.data_iterator))]
        made = run_on_all(lambda: _prepare(folder, tag), who=[0])
        try:
            data, sequence = gather_texts("" if made is None else f"{made.data} {made.sequence}")[
                0
            ].split()
            job = run_on_all(
                lambda: _Job(
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
            )
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
            self._finish_at_exit()
            self._ended.clear()
            thread = threading.Thread(target=self._run, args=(finish, lock), name=f"save {tag}")
            thread.start()
            if (3, 12) <= sys.version_info < (3, 12, 2):
                # These start no thread once the main one has ended (CPython gh-113964), and Orbax
                # starts some.
                thread.join()
        else:
            self._run(finish, lock)
            self.wait()
        return folder / tag

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk; all processes call.

        Raises:
            CheckpointError: It could not be written.
        """
        self._ended.wait()
        error, self._error = self._error, None
        run_on_all(lambda: _raise(error))

    def _agreed_tag(self, tag: Any) -> str:
        run_on_all(lambda: check_tag(tag))
        tags = gather_texts(tag)
        if len(set(tags)) > 1:
            named = ", ".join(f"process {i}: {each!r}" for i, each in enumerate(tags))
            raise CheckpointError(
                f"tag must be the same on all processes, but got {named}. Nothing was written: "
                "make it from what all know, such as the step."
            )
        return tag

    def _finish_at_exit(self) -> None:
        """Let the interpreter wait for saves in the background, however the program ends.

        Where one failed, it fails.
        """
        if self._is_waited_for:
            return
        self._is_waited_for = True
        reference = weakref.ref(self)

        def report() -> None:
            writer = reference()
            if writer is not None and writer._error is not None:
                sys.stdout = _FailingAtTheEnd(sys.stdout, writer._error)

        before_exit(self._ended.wait)
        atexit.register(report)

    def _run(self, finish: Callable[[], None], lock: DirectoryLock | None) -> None:
        """End a save; `wait` tells what failed, on all processes."""
        is_saved = False
        try:
            finish()
            is_saved = True
        # Whatever it is: a save that is not told of counts as done.
        except Exception as error:  # noqa: BLE001
            self._error = error
            if threading.current_thread() is not threading.main_thread():
                # Not by `log`, which writes in process 0 alone.
                logging.getLogger("jaxpipe").error("%s", error)
        finally:
            if lock is not None:
                lock.end_save(self, is_kept=is_saved)
            self._ended.set()


class _FailingAtTheEnd:
    """A stream that the interpreter cannot flush when it ends.

    The interpreter then prints why, and its exit status is 120.
    """

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream, self._error = stream, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush the stream, unless it is the last time."""
        self._stream.flush()
        if sys.is_finalizing():
            raise self._error


def _finish(job: _Job, keep_last: int | None, keep_every: int | None, *, background: bool) -> None:
    """Write the checkpoint; every process runs it."""
    started, is_there, may_come = time.perf_counter(), False, False
    # In a thread a process has nothing but its files to tell the others that it failed; here all
    # hear of it at once.
    write = partial(_write, job)
    failed = _caught(write if background else lambda: run_on_all(write))
    if failed is not None and background:
        _caught(lambda: report(job.data, error=_first_line(failed)))
    elif failed is None and job.lock is not None:
        failed = _caught(lambda: _commit(job, cast("DirectoryLock", job.lock)))
    if job.lock is not None and failed is None:
        _make_room(job, keep_last, keep_every)
    elif job.lock is not None:
        is_commit = isinstance(failed, NotSyncedError | StoreError) and str(
            failed.filename
        ).endswith(f"/{COMMIT}")
        # A store that did not answer may have taken the request, and commit still.
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
    """The exception that an action raises; None where it raises none."""
    try:
        action()
    # Whatever the libraries below raise; the caller reports it.
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _write(job: _Job) -> None:
    """Write this process's blocks, hash them meanwhile, and report to process 0."""
    with still_writing(job.data), ThreadPoolExecutor(1) as pool:
        # Hashing lets go of Python's lock.
        hashes = pool.submit(hash_blocks, {**job.arrays, **job.scalars})
        write_arrays(job.data / ARRAYS, job.arrays)
        sha256 = hashes.result()
    report(job.data, sha256=sha256)


def _commit(job: _Job, lock: DirectoryLock) -> None:
    """Put together what all processes report, and commit."""
    reports = collect(job.data, lock.check)
    finish_arrays(job.data / ARRAYS)
    content = dump_index(_index(job, reports))
    # A commit names only what is on disk: the arrays, the index with their hashes, then the
    # folders' entries, and last, by `commit`, one small file. Before it the tag is not there, after
    # it the tag is whole.
    replace_file(job.data / INDEX, content)
    remove_reports(job.data)
    # Of what Orbax writes it syncs the arrays' values alone, and no reader does without the rest.
    sync_tree(job.data)
    done = Commit(
        sequence=job.sequence,
        data=job.data.name,
        index_sha256=hashlib.sha256(content).hexdigest(),
        global_steps=job.content["global_steps"],
        is_latest=job.save_latest or read_latest(job.save_dir) == job.tag,
        saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    # Checked last: a job that took this one for dead may have begun to write, and one of two
    # commits is too many.
    lock.check()
    commit(job.save_dir, job.tag, done)


def _make_room(job: _Job, keep_last: int | None, keep_every: int | None) -> None:
    """Remove old checkpoints; the new one is committed, whatever happens here."""
    try:
        remove_data(job.data.parent, but=job.data.name)
        remove_old(job.save_dir, keep_last, keep_every)
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
    """A directory in which a checkpoint may be written.

    It is locked, and the folder for the data is there.
    """

    lock: DirectoryLock
    data: str
    sequence: int


def _prepare(save_dir: AnyPath, tag: str) -> _Prepared:
    """Make room and the folder for the data."""
    with _told(save_dir):
        make_folder(save_dir)
        lock = DirectoryLock.begin_save(save_dir.absolute())
        try:
            if link := link_of(save_dir / tag):
                raise CheckpointError(
                    "tag must not be a link, which may lead to another run's checkpoint, but got "
                    f"tag={tag!r} in save_dir={str(save_dir)!r}, a link to "
                    f"{str(link)!r}. Remove the link, or choose another tag."
                )
            for path in remove_leftovers(save_dir):
                log(logging.INFO, "removed %s, which an unfinished save had left", path)
            sequence = next_sequence(sound_tags(save_dir)[0])
            return _Prepared(lock, make_data(save_dir / tag, sequence).name, sequence)
        except BaseException:
            lock.end_save(None, is_kept=False)
            raise


def _checked_data(data: AnyPath, save_dir: AnyPath) -> AnyPath:
    with _told(save_dir):
        if data.is_dir():
            return data
    raise CheckpointError(
        f"save_dir must be a directory that all processes see, but got save_dir={str(save_dir)!r}, "
        f"in which process {jax.process_index()} does not find {data} that process 0 made. Give an "
        "absolute path on a shared disk."
    )


@contextlib.contextmanager
def _told(save_dir: AnyPath) -> Generator[None]:
    """Tell of what the file system does not do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"save_dir must be a directory that can be written, but got save_dir={str(save_dir)!r} "
            f"and {error.strerror or error} at {error.filename}. "
            f"{repair(save_dir, 'Check its permissions')}, or choose another."
        ) from error


def _content(
    pipeline: Pipeline, run: RunState, iterators: list[Any], leaves: Mapping[str, Leaf]
) -> dict[str, Any]:
    """The index without what the devices hold."""
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), pipeline.batch_struct
    )
    return {
        "global_steps": run.global_steps,
        "global_samples": run.global_samples,
        "mesh": dict(mesh_shape(pipeline.mesh)),
        "zero_stage": pipeline.config.zero_optimization.stage,
        "layers": describe_layers(pipeline, leaves),
        "excluded": tuple(key for key in pipeline.catalog if key not in leaves),
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
    """Make room after a failure, unless that came after the commit; True where it did.

    Where one array cannot be written Orbax leaves the writers of the others alone, and these make
    folders again. It says neither how many they are nor when the last one ends. So the data are
    removed until they stay away; the next save removes what comes later still, and all of it where
    storage does not answer now.
    """
    try:
        committed = read_commit(job.data.parent)
        if committed is not None and committed.data == job.data.name:
            return True
        if may_come:
            log(logging.WARNING, "%s is left for the next save to remove", job.data)
            return False
        num_quiet, deadline = 0, time.monotonic() + _CLEANING_S
        while num_quiet < _QUIET_POLLS and time.monotonic() < deadline:
            num_quiet = 0 if job.data.exists() else num_quiet + 1
            try_to_remove(job.data)
            time.sleep(_QUIET_PAUSE_S)
        with contextlib.suppress(OSError):  # a tag that was there before has data of its own
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
            f"{path} was written, but may be lost if the machine's power is: {_first_line(error)}. "
            "Check the file system, and save again."
        )
    if may_come:
        return CheckpointError(
            f"{path} may be written or not, for the store did not answer the last request: "
            f"{_first_line(error)}. It is whole if it is found, and other checkpoints are as they "
            f"were. {repair(path, '')}, and save again."
        )
    return CheckpointError(
        f"{path} could not be written: {_first_line(error)}. Earlier checkpoints are as they were. "
        f"{repair(path, 'Make room or check the file system')}, and save again."
    )


def _first_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"
