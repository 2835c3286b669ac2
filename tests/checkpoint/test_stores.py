"""Checkpoints on object stores.

The format is that on disk; what a process that dies, a request that fails and another job leave
behind is whole.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _covering import sweep
from _disk_store import DiskStore
from _layouts import Layout, all_leaves, assert_same, shared_engine
from _one_run import Run, assert_holds, make_run
from _save_to_store import STEPS, make
from _train_and_save import KEEP_LAST, saves
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import checkpoint
from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import StoreError, StorePath, _driver, upload
from jaxpipe.checkpoint import (
    CheckpointWriter,
    RunState,
    _lock,
    _reports,
    _writer,
    committed_tags,
    verify_checkpoint,
)
from jaxpipe.checkpoint.__main__ import main
from jaxpipe.checkpoint._object_lock import ObjectLock
from jaxpipe.checkpoint._owner import Owner, start_of
from jaxpipe.checkpoint._reports import collect, remove_reports, report, still_writing
from jaxpipe.checkpoint._staging import _array_of, _joined, _Range
from jaxpipe.checkpoint._store import finish_arrays, write_arrays
from jaxpipe.config import CSVMonitorSection
from jaxpipe.engine.monitor._csv import CSVMonitor
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict
from jaxpipe.monitor import Event

SCRIPT = Path(__file__).parent / "_save_to_store.py"
NUMBERS = itertools.count()
Held = dict[str, int]


@pytest.fixture
def memory() -> str:
    """A folder in the memory of this process that no other test uses."""
    return f"memory://bucket/{next(NUMBERS)}"


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/bucket/run"


@functools.cache
def small() -> Run:
    """An engine that nobody trains."""
    return make_run()


@functools.cache
def trained() -> Run:
    """The same one after a step."""
    run = make_run()
    run.train(1)
    return run


def save(url: str | Path, tag: str | None = None, run: Run | None = None) -> None:
    """Save as a job does that ends after that."""
    engine = (run or small()).engine
    CheckpointWriter().save(
        url, engine.pipeline, engine.state, RunState(global_steps=engine.global_steps), tag=tag
    )


def on_disk(url: str) -> Path:
    return Path(url.removeprefix("disk://"))


def store(url: str) -> StorePath:
    found = any_path(url, "url")
    assert isinstance(found, StorePath)
    return found


def names_in(url: str) -> set[str]:
    """Objects below a folder, but for a lock that nobody holds."""
    names = {file.url.removeprefix(f"{url}/"): size for file, size in store(url).files().items()}
    return {name for name, size in names.items() if size or name != ".lock/owner"}


def locks_in(url: str) -> set[str]:
    return {name for name in names_in(url) if name.startswith(".lock/")}


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for the thread of a lock: it removes the object once the run has been dropped."""
    gives_up_by = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < gives_up_by
        gc.collect()
        time.sleep(0.01)


def leaves_of(path: Any, tag: str | None = None) -> dict[Any, bytes]:
    found = flatten_dict(checkpoint.load_params(path, tag))
    return {key: leaf.tobytes() for key, leaf in found.items()}


LAYOUTS = [
    (Layout(2, 2, zero=1), Layout(1, 2)),
    (Layout(2, 1, schedule="interleaved", num_chunks=2), Layout(4, 2, zero=1)),
    (Layout(1, 1), Layout(2, 2, schedule="1f1b-v", zero=1)),
]


@pytest.mark.parametrize(("source", "target"), sweep(0, LAYOUTS, unpack=True), ids=str)
def test_any_layout_in_any_other(source: Layout, target: Layout, memory: str) -> None:
    engine = shared_engine(source)
    engine.save_checkpoint(memory, client_state={"epoch": 3})
    leaves = all_leaves(engine)
    other = shared_engine(target)
    tag = f"global_step{engine.global_steps}"
    assert other.load_checkpoint(memory) == (f"{memory}/{tag}", {"epoch": 3})
    assert_same(all_leaves(other), leaves)
    assert other.global_steps == engine.global_steps
    assert verify_checkpoint(memory).num_bytes > 0
    names = {name.partition("/")[0] for name in names_in(memory)}
    assert names == {tag, "latest", ".lock"}


def test_the_format_is_that_on_disk(memory: str, tmp_path: Path) -> None:
    """A copy of either, without its empty folders, opens as the other."""
    save(tmp_path / "here")
    for file in [file for file in (tmp_path / "here").rglob("*") if file.is_file()]:
        upload(file, store(f"{memory}/up/{file.relative_to(tmp_path / 'here')}"))
    assert leaves_of(f"{memory}/up") == leaves_of(tmp_path / "here")
    save(f"{memory}/there", "x")
    wait_until(lambda: not locks_in(f"{memory}/there"))
    download(f"{memory}/there", tmp_path / "down")
    assert leaves_of(tmp_path / "down") == leaves_of(tmp_path / "here")
    assert verify_checkpoint(tmp_path / "down").tag == "x"
    # A checkpoint that came so is replaced whole, on either side.
    save(f"{memory}/up")
    assert len(names_of_data(f"{memory}/up")) == 1
    save(tmp_path / "down", "x")
    assert len(list((tmp_path / "down/x").glob("data-*"))) == 1


def names_of_data(url: str) -> set[str]:
    return {"/".join(name.split("/")[:2]) for name in names_in(url) if "/data-" in name}


def test_old_ones_are_removed(memory: str) -> None:
    engine, writer = small().engine, CheckpointWriter(keep_last=2, keep_every=3)
    for step in range(1, 7):
        writer.save(memory, engine.pipeline, engine.state, RunState(global_steps=step))
    run, not_latest = RunState(global_steps=6), {"tag": "best", "save_latest": False}
    writer.save(memory, engine.pipeline, engine.state, run, **not_latest)
    kept = ["global_step3", "global_step5", "global_step6", "best"]
    assert list(committed_tags(memory)) == kept
    assert len(names_of_data(memory)) == 4
    assert checkpoint.open_checkpoint(memory).tag == "global_step6"


def test_in_the_background(memory: str) -> None:
    writer, engine = CheckpointWriter(), trained().engine
    run = RunState(global_steps=1)
    for tag in ("a", "b"):
        writer.save(memory, engine.pipeline, engine.state, run, tag=tag, background=True)
    writer.wait()
    assert list(committed_tags(memory)) == ["a", "b"]
    assert leaves_of(memory, "a") == leaves_of(memory, "b") == params_of(trained())


def test_files_of_the_temporary_directory_go(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "jaxpipe-staging-of-a-killed-process"
    left.mkdir()
    (left / ".in_use").touch()
    (tmp_path / "jaxpipe-staging-notes").mkdir()
    save(memory)
    small().engine.load_checkpoint(memory)
    assert [path.name for path in tmp_path.iterdir()] == ["jaxpipe-staging-notes"]


def test_a_load_says_that_the_temporary_directory_is_full(memory: str) -> None:
    run = make_run(4096)
    run.engine.save_checkpoint(memory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(
            CheckpointError,
            match=r"must be readable, but got .*File too large in the temporary .*TMPDIR",
        ):
            run.engine.load_checkpoint(memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.engine.load_checkpoint(memory)


def download(url: str, to: Path) -> None:
    for name in names_in(url):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(store(f"{url}/{name}").read_bytes())


def test_exports(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(f"{memory}/run")
    here = checkpoint.export_safetensors(f"{memory}/run", tmp_path / "model.safetensors")
    assert main(["export", f"{memory}/run", "--out", f"{memory}/model.safetensors"]) == 0
    assert f"{memory}/model.safetensors  " in capsys.readouterr().out
    assert store(f"{memory}/model.safetensors").read_bytes() == here[0].read_bytes()
    with pytest.raises(CheckpointError, match="without an export in other files, .* next to model"):
        checkpoint.export_safetensors(
            f"{memory}/run", f"{memory}/model.safetensors", max_shard_bytes=8
        )
    written = checkpoint.export_safetensors(
        f"{memory}/run", f"{memory}/parts/model.safetensors", max_shard_bytes=8
    )
    assert {path.name for path in written} == names_in(f"{memory}/parts")
    download(f"{memory}/parts", tmp_path / "parts")
    assert flatten_dict(checkpoint.load_safetensors(tmp_path / "parts")).keys() == (
        flatten_dict(checkpoint.load_params(f"{memory}/run")).keys()
    )


def test_on_the_command_line(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(memory)
    assert main(["inspect", memory]) == 0
    assert f"checkpoint    {memory}/global_step0" in capsys.readouterr().out
    assert main(["verify", memory]) == 0
    assert main(["verify", f"{memory}/nothing"]) == 1
    assert "no checkpoint. Pass the directory" in capsys.readouterr().err
    damaged = [store(f"{memory}/{name}") for name in names_in(memory) if "/d/" in name]
    for file in damaged:
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
    assert main(["verify", memory]) == 1
    assert "damaged" in capsys.readouterr().err
    for file in damaged:
        file.unlink()
    with pytest.raises(CheckpointError, match="are damaged or missing: load another tag"):
        small().engine.load_checkpoint(memory)


def test_a_reader_asks_for_what_it_needs(disk: str) -> None:
    """Of the arrays' files the nodes, and the ranges of the parameters."""
    engine = make_run(4096).engine
    engine.save_checkpoint(disk)
    everything = sum(file.stat().st_size for file in on_disk(disk).rglob("*") if file.is_file())
    read: list[int] = []
    true = DiskStore.get

    def get(self: DiskStore, *args: Any, **kwargs: Any) -> Any:
        found = true(self, *args, **kwargs)
        read.append(len(found.bytes()))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "get", get)
        found = checkpoint.load_params(disk)
    num_bytes = sum(leaf.nbytes for leaf in flatten_dict(found).values())
    assert num_bytes < everything / 2
    assert num_bytes < sum(read) < num_bytes + everything / 4


def test_ranges_of_a_file() -> None:
    near, far = _Range("a", 0, 10), _Range("a", 1 << 20, 1 << 21)
    assert _joined([far, _Range("a", 12, 20), near]) == [_Range("a", 0, 20), far]
    large = _Range("b", 5, (130 << 20) + 5)
    parts = _joined([large])
    assert [part.stop - part.start for part in parts] == [64 << 20, 64 << 20, 2 << 20]
    assert (parts[0].start, parts[-1].stop) == (large.start, large.stop)
    assert [_array_of(key) for key in ("a/b/c/0/1", "a/b/zarr.json", "c/c", "x/0/c/2")] == [
        *("a/b", "a/b", "c", "x/0")
    ]


# What other jobs do.


def claim(url: str, **differs: str) -> StorePath:
    """The lock as another process takes it."""
    owner = dataclasses.replace(Owner.here(url), **differs)
    file = store(url) / ".lock" / "owner"
    file.write_text(owner.name)
    return file


def is_held_by(url: str, host: str) -> bool:
    return f"-{host}" in (store(url) / ".lock" / "owner").read_text()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def test_held_by_a_process_of_this_machine(memory: str, sleeper: subprocess.Popen[bytes]) -> None:
    pid = str(sleeper.pid)
    claim(memory, pid=pid, start=start_of(pid), since="1700000000", host="here")
    with pytest.raises(
        CheckpointError, match=rf"got save_dir='{memory}', .* held by process {pid} on .* Save"
    ):
        save(memory)
    assert names_in(memory) == {".lock/owner"}
    sleeper.kill()
    sleeper.wait()
    save(memory)
    assert not is_held_by(memory, "here")


@pytest.mark.slow
def test_held_elsewhere_while_it_gives_signs_of_life(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lock, "_SILENT_S", 1.5)
    file, ended = claim(memory, place="89abcdef", host="far", since="1700000000"), threading.Event()

    def beat() -> None:
        while not ended.wait(0.5):
            file.write_text(file.read_text() + "\n.")

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(CheckpointError, match="which is held by process [0-9]+ on far since 2023"):
        save(memory)
    ended.set()
    thread.join()
    save(memory)  # once it has been silent for long
    assert not is_held_by(memory, "far")
    assert locks_in(memory) <= {".lock/owner"}  # no clock is left


def test_who_lost_the_lock_does_not_commit(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = _writer.collect

    def taken_over(data: StorePath, check: Callable[[], object]) -> Any:
        claim(memory, place="89abcdef", host="far")
        return true(data, lambda: None)

    save(memory, "before")
    wanted = leaves_of(memory)
    with monkeypatch.context() as patch:
        patch.setattr(_writer, "collect", taken_over)
        with pytest.raises(
            CheckpointError, match="lost its lock on the directory, .* by process [0-9]+ on far"
        ):
            save(memory, "after")
    assert list(committed_tags(memory)) == ["before"]
    assert leaves_of(memory) == wanted
    assert is_held_by(memory, "far")  # it gives back no lock but its own
    (store(memory) / ".lock" / "owner").unlink()
    save(memory, "after")


def test_an_answer_that_is_lost_does_not_lose_the_lock(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver repeats the request, and the store refuses the second one."""
    true = DiskStore.put

    def put(self: DiskStore, key: str, content: bytes | Path, **options: Any) -> None:
        true(self, key, content, **options)
        if "mode" in options:
            true(self, key, content, **options)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", put)
        lock = ObjectLock(store(disk))
        assert locks_in(disk)
        lock.release()
    assert names_in(disk) == set()


def test_a_lock_that_is_given_back_does_not_come_again(
    disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sign of life is a request of its own, which may be the later one."""
    monkeypatch.setattr(_lock, "_BEAT_S", 0.05)
    others, released = set(threading.enumerate()), threading.Event()
    lock = ObjectLock(store(disk))

    def release(number: int, name: str, path: str, is_done: bool) -> None:
        if name == "put" and not is_done and not released.is_set():
            released.set()
            lock.release()
            assert names_in(disk) == set()

    with DiskStore.hooked(release):
        assert released.wait(10)
        for thread in set(threading.enumerate()) - others:  # those of other tests go on
            if thread.name == "checkpoint lock":
                thread.join(1)
    assert names_in(disk) == set()


@pytest.mark.slow
def test_a_store_that_does_not_answer_holds_up_nobody_who_drops_a_run(disk: str) -> None:
    """A run ends in the garbage collector, which may come amid any other work."""
    may_end, threads, run = threading.Event(), set[str](), small()
    writer = CheckpointWriter()
    state = RunState(global_steps=1)
    writer.save(disk, run.engine.pipeline, run.engine.state, state, tag="a")
    assert len(locks_in(disk)) == 1

    def wait(number: int, name: str, path: str, is_done: bool) -> None:
        if name == "put" and path.endswith("/owner") and not is_done:
            threads.add(threading.current_thread().name)
            assert may_end.wait(60)

    with DiskStore.hooked(wait):
        del writer
        gc.collect()
        assert len(locks_in(disk)) == 1
        # The lock is nobody's already: the next run takes it.
        may_end.set()
        wait_until(lambda: not locks_in(disk))
    assert threads == {"checkpoint lock"}
    save(disk, "b")


def test_of_many_that_begin_at_once_one_gets_the_lock(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a host of its own, so that none knows of another but by the store."""
    monkeypatch.setattr(_lock, "_POLL_S", 0.01)
    rng = random.Random(0)
    for number in range(4):
        folder = store(f"{memory}/{number}")
        own = Owner.here(folder.url)
        owners = [dataclasses.replace(own, place=f"{i:08x}", host=f"host{i}") for i in range(6)]
        pauses = [rng.uniform(0, 0.03) for _ in owners]
        with ThreadPoolExecutor(len(owners)) as pool:
            got = list(pool.map(functools.partial(takes, folder, ended=[]), owners, pauses))
        (lock,) = (each for each in got if each is not None)
        assert is_held_by(folder.url, owners[got.index(lock)].host)
        lock.release()


def takes(
    folder: StorePath, owner: Owner, pause_s: float, *, ended: list[str]
) -> ObjectLock | None:
    """Ask for the lock, and give signs of life if it is had until the five others have ended."""
    time.sleep(pause_s)
    try:
        lock = ObjectLock(folder, owner)
    except CheckpointError:
        ended.append(owner.name)
        return None
    deadline = time.monotonic() + 10
    while len(ended) < 5 and time.monotonic() < deadline:
        lock.check()
        time.sleep(0.02)
    return lock


def test_processes_tell_process_0_through_the_store(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_reports, "_BEAT_S", 0.05)
    monkeypatch.setattr(_reports, "_SILENT_S", 0.5)
    data = store(memory)
    report(data, sha256={"a": {"0": ["x"]}})
    with pytest.raises(TimeoutError, match=rf"^process 1 has written nothing to {memory} for"):
        collect(data, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        with still_writing(data):
            time.sleep(0.2)
            report(data, error="OSError: no room")
    assert names_in(memory) == {"report-0.json", "report-1.json", "writing-1"}
    with pytest.raises(OSError, match=r"^process 1: OSError: no room"):
        collect(data, lambda: None)
    remove_reports(data)
    assert names_in(memory) == set()


# Requests that fail.


class RefusedError(Exception):
    """What a driver raises: not always an OSError."""


def test_a_driver_that_names_the_url() -> None:
    path = any_path("memory://user:s3cret@box/run", "save_dir")
    assert isinstance(path, StorePath)
    assert repr(path) == "StorePath('memory://user:***@box/run')"
    text = "memory://user:s3cret@box is no bucket"
    with pytest.raises(StoreError) as caught, path.asking():
        raise ValueError(text)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_name_that_no_store_can_have() -> None:
    with pytest.raises(
        CheckpointError, match=r"save_dir='memory://run\\udcff', for which it fails"
    ):
        save("memory://run\udcff")


def test_a_store_that_refuses_all(disk: str) -> None:
    save(disk)
    wanted = leaves_of(disk)

    def refuse(number: int, name: str, path: str, is_done: bool) -> None:
        raise RefusedError("no such key 'AKIA'\nand more")

    with DiskStore.hooked(refuse):
        for call in (
            lambda: save(disk),
            lambda: small().engine.load_checkpoint(disk),
            lambda: checkpoint.load_params(disk),
            lambda: committed_tags(disk),
            lambda: checkpoint.inspect_checkpoint(disk),
            lambda: checkpoint.export_safetensors(disk, "x.safetensors"),
        ):
            with pytest.raises(CheckpointError, match="RefusedError: no such key 'AKIA'") as caught:
                call()
            assert len(str(caught.value).splitlines()) == 1
    assert leaves_of(disk) == wanted


def prepare(disk: str) -> None:
    """Make two checkpoints of a run before its first step."""
    save(disk, "old")
    save(disk, "new")


@functools.cache
def requests_of_a_save(top: Path) -> int:
    prepare(f"disk://{top}/counted")
    with DiskStore.hooked(None):
        save(f"disk://{top}/counted", "new")
        return DiskStore.number


def params_of(run: Run) -> dict[Any, bytes]:
    found = flatten_dict(run.engine.module_state_dict())
    return {key: leaf.tobytes() for key, leaf in found.items()}


def check_after_failure(disk: str, error: str | None) -> None:
    """The old one is as it was; the new one is whole, and there if the save has said so."""
    before, after = params_of(small()), params_of(trained())
    assert before != after
    assert set(committed_tags(disk)) == {"old", "new"}
    assert leaves_of(disk, "old") == before
    now = leaves_of(disk, "new")
    if error is None:
        assert now == after
    elif "may be written or not" in error:
        assert now in (before, after)
    else:
        assert "could not be written" in error or "must be a directory that can be" in error
        assert now == before
    for tag in ("old", "new"):
        verify_checkpoint(disk, tag)
    save(disk, "next", trained())
    assert leaves_of(disk, "next") == after
    assert len(names_of_data(disk)) == 3
    shutil.rmtree(on_disk(disk) / "next")


def failing(numbers: set[int], after: bool) -> Callable[[int, str, str, bool], None]:
    def fail(number: int, name: str, path: str, is_done: bool) -> None:
        if number in numbers and is_done == after:
            raise RefusedError("503 Slow Down")

    return fail


@pytest.mark.parametrize(
    "seed",
    [
        *range(2),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 100)),
    ],
)
def test_requests_that_fail(disk: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One, or all from one on for a while, before they are done or with the answer lost."""
    rng, total = random.Random(seed), requests_of_a_save(tmp_path_factory.getbasetemp())
    first = rng.randrange(total)
    last = first if seed % 4 < 2 else first + rng.randrange(40)
    prepare(disk)
    error = None
    with DiskStore.hooked(failing(set(range(first, last + 1)), after=seed % 2 == 1)):
        try:
            save(disk, "new", trained())
        except CheckpointError as failed:
            error = str(failed)
    assert error is None or "503 Slow Down" in error
    check_after_failure(disk, error)


def test_a_commit_whose_answer_is_lost(disk: str) -> None:
    prepare(disk)

    def lose(number: int, name: str, path: str, is_done: bool) -> None:
        if name in names and path.endswith("/new/commit.json") and is_done:
            raise RefusedError("timed out")

    names = ["put"]  # the next request finds it there
    with DiskStore.hooked(lose):
        save(disk, "new", trained())
    check_after_failure(disk, None)
    names = ["put", "get"]
    with (
        DiskStore.hooked(lose),
        pytest.raises(CheckpointError, match="may be written or not, for the store did not .*save"),
    ):
        save(disk, "new")
    assert leaves_of(disk, "new") == params_of(small())
    save(disk, "new", trained())
    check_after_failure(disk, None)


def test_a_commit_that_comes_late(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does it once the driver has given up; what it names is there still."""
    late: dict[str, bytes] = {}
    true = DiskStore.put

    def put(self: DiskStore, key: str, content: Any, **options: Any) -> None:
        if key.endswith("/commit.json"):
            late[f"/{key}"] = content
            raise RefusedError("timed out")
        true(self, key, content, **options)

    prepare(disk)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", put)
        with pytest.raises(CheckpointError, match=r"may be written or not, .* RefusedError"):
            save(disk, "new", trained())
    assert leaves_of(disk, "new") == params_of(small())
    for path, value in late.items():
        Path(path).write_bytes(value)
    check_after_failure(disk, None)


@pytest.mark.filterwarnings("ignore:Passed over. .*/latest must be a readable text")
def test_loads_that_fail(disk: str) -> None:
    run = small()
    save(disk)
    wanted = run.held()
    with DiskStore.hooked(None):
        run.engine.load_checkpoint(disk)
        total = DiskStore.number
    for number in range(0, total, 3):
        # What is read only to see whether anything has changed may fail.
        hook = failing({number}, after=number % 2 == 0)
        with DiskStore.hooked(hook), contextlib.suppress(CheckpointError):
            run.engine.load_checkpoint(disk)
        assert_holds(run, wanted)


# A store that answers wrongly.


@pytest.mark.parametrize("answer", sweep(1, ["one is missing", "empty"]))
def test_a_wrong_listing_commits_nothing(
    disk: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """One answer to a listing during a save, of any of its folders."""
    true = DiskStore.list_with_delimiter
    run = trained()
    with DiskStore.hooked(None):
        save(disk, "old", run)
        save(disk, "new", run)
    for wrong in range(3, 9):
        calls = itertools.count()

        def ls(
            self: DiskStore, key: str, calls: Iterator[int] = calls, wrong: int = wrong
        ) -> dict[str, list[Any]]:
            found = true(self, key)
            if next(calls) != wrong:
                return found
            if answer == "empty":
                return {"common_prefixes": [], "objects": []}
            kind = max(found, key=lambda kind: len(found[kind]))
            return {**found, kind: found[kind][1:]}

        with monkeypatch.context() as patch, contextlib.suppress(CheckpointError):
            patch.setattr(DiskStore, "list_with_delimiter", ls)
            save(disk, "new", run)
        for tag in ("old", "new"):
            verify_checkpoint(disk, tag)


def test_the_parts_of_all_processes_are_committed_or_nothing(disk: str, tmp_path: Path) -> None:
    """Storage may show fewer of them than were written."""
    for path in (store(disk), tmp_path):
        arrays = {"a": jax.numpy.ones((2, 3)), "b": jax.numpy.zeros(())}
        num_chunks = write_arrays(path, arrays)
        with pytest.raises(OSError, match="holds 2 of the 3 chunks that were written"):
            finish_arrays(path, arrays, num_chunks + 1)
        finish_arrays(path, arrays, num_chunks)


def test_a_block_that_was_not_written_is_missed(disk: str, tmp_path: Path) -> None:
    """A library may return from a save and have left out blocks."""
    halves = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), P("x"))
    divided = {"a": jax.device_put(np.ones((2, 3)), halves), "b": jax.numpy.zeros(())}
    for path in (store(disk), tmp_path):
        num_chunks = write_arrays(path, {**divided, "a": jax.numpy.ones((2, 3))})
        with pytest.raises(OSError, match="holds 1 of the 2 blocks of a"):
            finish_arrays(path, divided, num_chunks)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_latest_that_cannot_be_written(disk: str, keep_last: int) -> None:
    """The newest checkpoint is found, and what `latest` still names stays."""
    engine, writer = small().engine, CheckpointWriter(keep_last=keep_last)

    def step(number: int) -> None:
        writer.save(disk, engine.pipeline, engine.state, RunState(global_steps=number))

    def fail(number: int, name: str, path: str, is_done: bool) -> None:
        if name == "put" and path.endswith("/latest"):
            raise RefusedError("503 Slow Down")

    step(1)
    with DiskStore.hooked(fail):
        step(2)
        step(3)
    assert {"global_step1", "global_step3"} <= {*committed_tags(disk)}
    with pytest.warns(UserWarning, match="/latest names 'global_step1', but 'global_step3'"):
        assert checkpoint.open_checkpoint(disk).tag == "global_step3"
    (on_disk(disk) / "global_step1" / "commit.json").unlink()  # as earlier releases did
    with pytest.warns(UserWarning, match="'global_step3' is the newest checkpoint that is there"):
        assert checkpoint.open_checkpoint(disk).tag == "global_step3"
    step(4)
    assert len(committed_tags(disk)) == keep_last
    assert checkpoint.open_checkpoint(disk).tag == "global_step4"


def test_requests_of_a_save_do_not_grow_with_the_tags(disk: str) -> None:
    engine, writer = small().engine, CheckpointWriter(keep_last=1)
    run = RunState(global_steps=1)
    writer.save(disk, engine.pipeline, engine.state, run)

    def requests() -> int:
        writer.save(disk, engine.pipeline, engine.state, run)
        with DiskStore.hooked(None):
            writer.save(disk, engine.pipeline, engine.state, run)
            # Without heartbeats of this lock, and of those of other tests.
            paths = [path for _, path in DiskStore.calls if "/.lock/" not in path]
            return sum(path.startswith(str(on_disk(disk))) for path in paths)

    few = requests()
    for i in range(40):
        shutil.copytree(on_disk(disk) / "global_step1", on_disk(disk) / f"other{i}")
    assert requests() < few + 8  # the files of a save differ in number
    shutil.rmtree(on_disk(disk) / "other0")
    assert requests() < few + 8
    assert len(committed_tags(disk)) == 40


# Processes that die.


@functools.cache
def uninterrupted() -> tuple[Run, list[dict[str, Any]]]:
    """A run that nobody killed: all that the engine held after each step."""
    run = make()
    held = [run.held()]
    for _ in range(STEPS):
        run.train(1)
        held.append(run.held())
    return run, held


def run_script(url: str, *options: Any) -> tuple[int, list[str]]:
    paths = [str(Path(jaxpipe.__file__).parents[1]), str(SCRIPT.parents[1])]
    done = subprocess.run(
        [sys.executable, SCRIPT, url, *map(str, options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-4000:]
    return done.returncode, done.stdout.split()


@functools.cache
def num_requests(top: Path) -> int:
    """Of the script, when nobody kills it; their order differs, their number hardly does."""
    code, words = run_script(f"disk://{top}/counted")
    assert code == 0
    return int(words[-1])


def after(num_saves: int) -> Held:
    """The checkpoints after so many saves."""
    held: Held = {}
    for tag, step in saves(STEPS)[:num_saves]:
        held.pop(tag, None)
        held[tag] = step
        for old in [each for each in held if each.startswith("global_step")][:-KEEP_LAST]:
            del held[old]
    return held


def check_killed(url: str, num_saved: int) -> None:
    """All that was reported is there, whole, and the next save removes the rest."""
    run, states = uninterrupted()
    held = {tag: commit.global_steps for tag, commit in committed_tags(url).items()}
    new = dict(saves(STEPS)[num_saved : num_saved + 1])
    before = after(num_saved)
    during = {tag: step for tag, step in before.items() if tag not in new}
    assert held in [before, {**during, **new}, after(num_saved + 1)]
    for tag, step in held.items():
        run.engine.load_checkpoint(url, tag)
        assert_holds(run, states[step])
    if held:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `latest` may name the one before
            run.engine.load_checkpoint(url)
        assert_holds(run, states[list(held.values())[-1]])
    engine = make().engine
    engine.save_checkpoint(url, "next")
    assert names_of_data(url) == {
        f"{tag}/{commit.data}" for tag, commit in committed_tags(url).items()
    }
    assert len([name for name in names_in(url) if name.startswith(".lock/")]) == 1


SEEDS = [pytest.param(i, marks=pytest.mark.slow if i < 1 else pytest.mark.soak) for i in range(100)]


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_a_request(
    disk: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    total = num_requests(tmp_path_factory.getbasetemp())
    number = random.Random(seed).randrange(total * 9 // 10)
    options = ["--after"] * (seed % 2) + ["--background"] * (seed % 4 > 1)
    code, words = run_script(disk, "--request", number, *options)
    # How often a process asks whether it may go on is not the same each time.
    assert code == -signal.SIGKILL or int(words[-1]) <= number
    check_killed(disk, words.count("saved"))


@pytest.mark.slow
def test_two_jobs_at_once(disk: str) -> None:
    """One saves all, the other is refused; whichever it is."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda name: run_again(disk, name), "ab"))
    for (name, lines), (_, others) in (both, both[::-1]):
        refused = [line for line in lines if line.startswith("refused")]
        assert all("which is held by process" in line for line in refused)
        assert len([line for line in lines if line.startswith("saved")]) == 3
        assert name
        assert others
    assert verify_checkpoint(disk).num_bytes > 0
    assert names_of_data(disk) == {
        f"{tag}/{commit.data}" for tag, commit in committed_tags(disk).items()
    }


def run_again(url: str, name: str) -> tuple[str, list[str]]:
    program = f"import _disk_store, _save_again_and_again as x; x.main({url!r}, {name!r}, '3')"
    paths = [str(Path(jaxpipe.__file__).parents[1]), str(SCRIPT.parents[1]), str(SCRIPT.parent)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return name, done.stdout.splitlines()


# Servers that speak the protocols of Amazon and Google.


Application = Callable[[dict[str, Any], Callable[..., Any]], Any]


def serves_google(app: Application) -> Application:
    """Google's protocol is Amazon's with other names, and with generations in place of ETags."""

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        generation = environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None)
        if generation == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        elif generation is not None:
            environ["HTTP_IF_MATCH"] = f'"{int(generation):032x}"'

        def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            tag = next((value.strip('"') for name, value in headers if name == "ETag"), "-")
            more = [] if "-" in tag else [("x-goog-generation", str(int(tag, 16)))]
            return start(status, headers + more, *rest)

        return app(environ, begin)

    return serve


def fails_often(app: Application) -> Application:
    """Every third request is refused, or done without saying so."""
    numbers, refused = itertools.count(), random.Random(0)

    def serve(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        number = next(numbers)
        if number < 2 or number % 3 != 2:  # not the bucket's
            return app(environ, start)
        if refused.random() < 0.5:
            b"".join(app(environ, lambda *_: None))
        start("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    return serve


@contextlib.contextmanager
def served(wraps: Callable[[Application], Application], protocol: str) -> Iterator[str]:
    """A bucket named `bucket` on a server, whose application is wrapped."""
    moto = pytest.importorskip("moto.moto_server.threaded_moto_server")
    true = moto.DomainDispatcherApplication
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moto, "DomainDispatcherApplication", lambda *args: wraps(true(*args)))
        server = moto.ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "GOOGLE_BASE_URL": f"http://{host}:{port}",
            "GOOGLE_BEARER_TOKEN": "secret",
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        _driver.cache_clear()
        # What other tests have written stays in this process.
        for path, method in (("moto-api/reset", "POST"), ("bucket", "PUT")):
            url = f"http://{host}:{port}/{path}"
            urllib.request.urlopen(urllib.request.Request(url, method=method)).close()
        yield f"{protocol}://bucket"
        # A run that is dropped gives its lock back: while there is a server that can take it.
        gc.collect()
        server.stop()
    _driver.cache_clear()


def test_a_profile_of_aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    keys = "aws_access_key_id = mine\naws_secret_access_key = secret"
    (tmp_path / "credentials").write_text(f"[work]\n{keys}\n")
    (tmp_path / "config").write_text("[profile work]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    bucket = _driver("s3", "of-a-profile")
    assert bucket.credential_provider()["access_key_id"] == "mine"
    assert bucket.config["region"] == "eu-west-3"
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(CheckpointError, match=r"s3://.*profile \(other\) could not be found"):
        any_path("s3://of-another/run", "save_dir")


SERVERS = {
    "s3": functools.partial(served, lambda app: app, "s3"),
    "gs": functools.partial(served, serves_google, "gs"),
    "s3 that fails": functools.partial(served, fails_often, "s3"),
}


@pytest.fixture(params=SERVERS)
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    with SERVERS[request.param]() as url:
        yield url


@pytest.mark.slow
def test_servers(bucket: str, tmp_path: Path) -> None:
    run = make_run(4096, checkpoint={"keep_last": 2})
    for step in range(4):
        run.engine.save_checkpoint(f"{bucket}/run", client_state={"step": step})
        wanted = run.held()
        run.train(1)
    assert run.engine.load_checkpoint(f"{bucket}/run")[1] == {"step": 3}
    assert_holds(run, wanted)
    assert list(committed_tags(f"{bucket}/run")) == ["global_step2", "global_step3"]
    assert len(names_of_data(f"{bucket}/run")) == 2
    assert verify_checkpoint(f"{bucket}/run").num_bytes > 0
    download(f"{bucket}/run", tmp_path / "run")
    assert leaves_of(tmp_path / "run") == leaves_of(f"{bucket}/run")
    checkpoint.export_safetensors(f"{bucket}/run", f"{bucket}/out/model.safetensors")
    assert names_in(f"{bucket}/out") == {"model.safetensors"}
    found = checkpoint.load_safetensors(f"{bucket}/out")
    jax.tree.map(np.testing.assert_array_equal, found, checkpoint.load_params(f"{bucket}/run"))
    monitor = CSVMonitor(CSVMonitorSection(True, f"{bucket}/logs", "job"))
    monitor([Event("a", 0.5, 8)])
    monitor.close()
    assert store(f"{bucket}/logs/job/a.csv").read_text().split() == ["step,a", "8,0.5"]
    with pytest.raises(CheckpointError, match=r"bucket does not exist|NoSuchBucket|not found"):
        run.engine.save_checkpoint(f"{bucket[:2]}://nothing/run")


@pytest.mark.slow
def test_the_lock_on_servers(bucket: str) -> None:
    """Of many that ask at once one gets it; a dead owner's is taken over."""
    folder = store(f"{bucket}/run")
    own = Owner.here(folder.url)

    def takes(owner: Owner) -> ObjectLock | None:
        with contextlib.suppress(CheckpointError):
            return ObjectLock(folder, owner)
        return None

    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(4)]
        for child in children:
            stack.callback(child.kill)
        pids = [str(child.pid) for child in children]
        owners = [dataclasses.replace(own, pid=pid, start=start_of(pid)) for pid in pids]
        with ThreadPoolExecutor(len(owners)) as pool:
            got = list(pool.map(takes, owners))
        (first,) = (each for each in got if each is not None)
        ((_, owner),) = ObjectLock.owners(folder / ".lock")
        assert owner == owners[got.index(first)]
    second = ObjectLock(folder, own)
    # The one that was taken for dead writes no more.
    first.release()
    with pytest.raises(OSError, match="lost its lock"):
        first.check()
    second.check()
    second.release()
    assert locks_in(folder.url) == set()
    third = ObjectLock(folder, dataclasses.replace(own, nonce="00000001"))
    assert locks_in(folder.url) == {".lock/owner"}
    third.release()
