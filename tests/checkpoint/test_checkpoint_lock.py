"""The lock on a directory.

Who holds it is told, who is gone is not waited for, and who lost it does not commit.
"""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, make_run

import jaxpipe
from jaxpipe.checkpoint import (
    CheckpointWriter,
    RunState,
    _lock,
    _writer,
    committed_tags,
    load_params,
)
from jaxpipe.checkpoint._folder_lock import FolderLock
from jaxpipe.checkpoint._owner import Owner, start_of
from jaxpipe.errors import CheckpointError

SCRIPT = Path(__file__).parent / "_save_again_and_again.py"
STAYING = Path(__file__).parent / "_save_and_stay.py"


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child
        child.kill()


def save(run: Run, path: Path, step: int = 1, **how: Any) -> CheckpointWriter:
    writer = CheckpointWriter()
    writer.save(path, run.engine.pipeline, run.engine.state, RunState(global_steps=step), **how)
    return writer


def owner_of(path: Path) -> Owner:
    """This process, as the owner of a directory's lock."""
    return Owner.here(str(path.stat().st_ino))


def held_by(path: Path, age_s: float = 0.0, **changed: str) -> Path:
    """The lock of another owner, who gave the last sign of life so long ago."""
    owner = dataclasses.replace(owner_of(path), **changed)
    file = path / ".lock" / owner.name
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (time.time() - age_s,) * 2)
    return file


def held_in(path: Path) -> list[str]:
    """Names of the files of locks."""
    return [each.name for each in path.glob(".lock/*")]


def test_it_is_there_from_the_first_save_of_a_run_to_its_end(run: Run, tmp_path: Path) -> None:
    writer = CheckpointWriter()
    for step in (1, 2):
        writer.save(
            tmp_path,
            run.engine.pipeline,
            run.engine.state,
            RunState(global_steps=step),
            background=True,
        )
        writer.wait()
        (name,) = held_in(tmp_path)
        assert name.split("-")[1] == str(os.getpid())
    assert list(committed_tags(tmp_path)) == ["global_step1", "global_step2"]
    del writer
    gc.collect()
    assert not list(tmp_path.glob(".lock*"))


def test_runs_of_one_process_share_it(run: Run, tmp_path: Path) -> None:
    first = save(run, tmp_path, 1)
    second = save(run, tmp_path, 2)
    first.save(tmp_path, run.engine.pipeline, run.engine.state, RunState(global_steps=4))
    names = held_in(tmp_path)
    assert len(names) == 1
    del first
    gc.collect()
    assert held_in(tmp_path) == names
    del second
    gc.collect()
    assert held_in(tmp_path) == []


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="there each save is waited for"
)
def test_two_saves_of_one_process_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, may_end = save(run, tmp_path, 1), threading.Event()
    true = _writer._write

    def end(*args: Any) -> None:
        may_end.wait()
        true(*args)

    monkeypatch.setattr(_writer, "_write", end)
    writer.save(
        tmp_path, run.engine.pipeline, run.engine.state, RunState(global_steps=2), background=True
    )
    try:
        with pytest.raises(
            CheckpointError,
            match=f"held by process {os.getpid()} on .* UTC, which is this process. S",
        ):
            save(run, tmp_path, 3)
    finally:
        may_end.set()
    writer.wait()
    save(run, tmp_path, 3)
    assert list(committed_tags(tmp_path)) == ["global_step1", "global_step2", "global_step3"]


def test_a_lock_that_could_not_be_given_back_is_in_nobodys_way(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = FolderLock(tmp_path)
    with monkeypatch.context() as outage:
        outage.setattr(
            Path,
            "unlink",
            lambda *args, **kwargs: (_ for _ in ()).throw(OSError(errno.EIO, "is out")),
        )
        lock.release()
    assert len(held_in(tmp_path)) == 1
    save(run, tmp_path)
    assert list(committed_tags(tmp_path)) == ["global_step1"]


def test_a_copy_of_a_directory_is_not_held(
    run: Run, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "first").mkdir()
    writer = save(run, tmp_path / "first")
    began = time.monotonic()
    save(run, shutil.copytree(tmp_path / "first", tmp_path / "copy"), 2)
    held_by(tmp_path / "copy", pid=str(sleeper.pid), start=start_of(str(sleeper.pid)))
    other = shutil.copytree(tmp_path / "copy", tmp_path / "other")
    for file in (other / ".lock").iterdir():
        os.utime(file, (time.time() - 61,) * 2)
    save(run, other, 3)
    assert time.monotonic() - began < 30
    del writer


@pytest.mark.slow
def test_another_job_is_refused_until_the_first_has_ended(run: Run, tmp_path: Path) -> None:
    """But may read."""
    with staying(tmp_path) as job:
        with pytest.raises(
            CheckpointError,
            match=f"which is held by process {job.pid} on .* UTC. Save again when th",
        ):
            save(run, tmp_path, 7)
        run.engine.load_checkpoint(tmp_path)
        job.communicate("end\n", timeout=60)
        assert job.returncode == 0
    assert not list(tmp_path.glob(".lock*"))
    save(run, tmp_path, 7)


@pytest.mark.slow
def test_a_job_that_was_killed_after_its_save_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    with staying(tmp_path) as job:
        job.kill()
        job.communicate()
    assert len(held_in(tmp_path)) == 1
    began = time.monotonic()
    save(run, tmp_path, 7)
    assert time.monotonic() - began < 20


@contextlib.contextmanager
def staying(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that has saved, and goes on until it is told to end."""
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(STAYING), str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "saved\n"
            yield job
        finally:
            job.kill()


def test_a_process_that_lives_is_named(
    run: Run, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    pid = str(sleeper.pid)
    file = held_by(
        tmp_path, age_s=1e6, pid=pid, start=start_of(pid), since="1700000000", host="node-7"
    )
    match = (
        rf"one job at a time, but got save_dir='{tmp_path}', which is held by process {pid} on "
        r"node-7 since 2023-11-14 "
    )
    with pytest.raises(
        CheckpointError,
        match=match + "22:13:20 UTC. Save again when that process has ended, or give each job",
    ):
        save(run, tmp_path)
    assert file.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_process_that_was_killed_is_not_waited_for(
    run: Run, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    """Neither before nor after its parent has taken note of it."""
    pid = str(sleeper.pid)
    start = start_of(pid)
    sleeper.kill()
    while start_of(pid) == start:
        time.sleep(0.01)
    for step in (1, 2):
        held_by(tmp_path, pid=pid, start=start)
        began = time.monotonic()
        save(run, tmp_path, step)
        assert time.monotonic() - began < 20
        sleeper.wait()
    assert list(committed_tags(tmp_path)) == ["global_step1", "global_step2"]


def test_a_number_that_is_another_process_now(
    run: Run, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    for pid in (str(sleeper.pid), str(os.getpid())):
        held_by(tmp_path, pid=pid, start="1")
        save(run, tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_another_save_of_this_process(run: Run, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=f"held by process {os.getpid()} on .* UTC, which is this process. Save",
    ):
        save(run, tmp_path)
    lock.release()
    save(run, tmp_path)


def test_a_fork_does_not_take_the_lock_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]
) -> None:
    lock, pid = FolderLock(tmp_path), os.getpid()
    lock.end_save(sleeper, is_kept=True)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: sleeper.pid)
        with pytest.raises(CheckpointError, match=f"held by process {pid} on "):
            FolderLock.begin_save(tmp_path)
        lock.release()
    lock.check()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lost_lock_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not asked for again and again, which on a store is a request each time."""
    monkeypatch.setattr(_lock, "_BEAT_S", 0.01)
    beats = []
    beat = FolderLock._beat
    monkeypatch.setattr(FolderLock, "_beat", lambda lock: (beats.append(lock), beat(lock)))
    lock = FolderLock(tmp_path)
    shutil.rmtree(tmp_path / ".lock")
    beats.clear()
    while lock not in beats:  # the first that finds it lost is the last, but for one on its way
        time.sleep(0.01)
    time.sleep(0.2)
    assert beats.count(lock) <= 2  # runs of other tests may hold locks too
    lock.release()


def test_another_machine_that_was_silent_for_long(run: Run, tmp_path: Path) -> None:
    held_by(tmp_path, age_s=61, place="0" * 8)
    save(run, tmp_path)
    assert list(committed_tags(tmp_path)) == ["global_step1"]


@pytest.mark.slow
def test_another_machine_falls_silent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is there cannot be known before."""
    monkeypatch.setattr(_lock, "_SILENT_S", 1.5)
    held_by(tmp_path, place="0" * 8)
    began = time.monotonic()
    save(run, tmp_path)
    assert time.monotonic() - began > 1.4
    assert list(committed_tags(tmp_path)) == ["global_step1"]


def test_another_machine_gives_signs_of_life(run: Run, tmp_path: Path) -> None:
    file, stop = held_by(tmp_path, place="0" * 8, host="node-8"), threading.Event()

    def beat() -> None:
        while not stop.wait(0.1):
            file.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(
            CheckpointError,
            match="is held by process .* on node-8 since .* UTC. Save again when that",
        ):
            save(run, tmp_path)
    finally:
        stop.set()
        thread.join()


def test_many_at_once(tmp_path: Path) -> None:
    """One of them takes over from a process that has died, however often it is tried."""
    for _ in range(30):
        held_by(tmp_path, pid="4194305", start="1")
        locks: list[FolderLock] = []
        refused: list[CheckpointError] = []
        barrier = threading.Barrier(8)

        def take(
            locks: list[FolderLock] = locks,
            refused: list[CheckpointError] = refused,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait()
            try:
                locks.append(FolderLock(tmp_path))
            except CheckpointError as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(locks), len(refused)) == (1, 7)
        locks[0].check()
        locks[0].release()
        assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_of_locks_is_removed(run: Run, tmp_path: Path) -> None:
    """But nothing that only looks like it."""
    left = tmp_path / ".lock-0123abcd"
    left.mkdir()
    (left / dataclasses.replace(owner_of(tmp_path), pid="4194305", start="1").name).touch()
    for name in (".lock-mine", ".lock-89abcdef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    os.utime(tmp_path / ".lock-89abcdef" / "notes.txt", (0, 0))
    save(run, tmp_path)
    assert not left.exists()
    assert all(
        (tmp_path / name / "notes.txt").exists() for name in (".lock-mine", ".lock-89abcdef")
    )


def test_an_owner_that_ends_while_it_is_watched_is_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone between two looks at it."""
    file = held_by(tmp_path, place="0" * 8)
    true = FolderLock._is_gone

    def is_gone(*args: Any) -> bool:
        gone = true(*args)
        file.unlink(missing_ok=True)
        return gone

    monkeypatch.setattr(FolderLock, "_is_gone", is_gone)
    FolderLock(tmp_path).release()


def test_a_pipe_in_the_place_of_an_owner_is_not_waited_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes into it: opening it would never return."""
    monkeypatch.setattr(_lock, "_SILENT_S", 0.5)
    (tmp_path / ".lock").mkdir()
    os.mkfifo(tmp_path / ".lock" / "pipe")
    FolderLock(tmp_path).release()
    assert not (tmp_path / ".lock").exists()


def test_leftovers_that_cannot_be_read_do_not_stop_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock-0123abcd").mkdir()
    true = FolderLock.owners

    def owners(folder: Path) -> list[Any]:
        if folder.name == ".lock-0123abcd":
            raise PermissionError(13, "Permission denied", str(folder))
        return true(folder)

    monkeypatch.setattr(FolderLock, "owners", staticmethod(owners))
    FolderLock(tmp_path).release()


LOSSES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "report": (
        lambda path: next(path.glob("*/data-*/report-0.json")).unlink(),
        "was removed by somebody else while",
    ),
    "data": (
        lambda path: shutil.rmtree(next(path.glob("*/data-*"))),
        "was removed by somebody else while it was written",
    ),
    "lock": (
        lambda path: shutil.rmtree(path / ".lock"),
        "lost its lock on the directory, which is now held by nobody",
    ),
    "owner": (
        lambda path: next((path / ".lock").iterdir()).rename(
            path / ".lock" / "1-2-3-00000000-00000000-node-9"
        ),
        "now held by process 2 on node-9 since 1970-01-01 00:00:01 UTC",
    ),
}


@pytest.mark.parametrize(("lose", "match"), sweep(2, [*LOSSES.values()], unpack=True), ids=LOSSES)
def test_a_job_whose_own_work_vanished_fails_at_once(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Path], Any],
    match: str,
) -> None:
    """It would wait for its own report otherwise, or commit what another job removes."""
    true = _writer.collect

    def reports(*args: Any) -> Any:
        lose(tmp_path)
        return true(*args)

    monkeypatch.setattr(_writer, "collect", reports)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=f"/global_step1 could not be written: .*{match}"):
        save(run, tmp_path)
    assert time.monotonic() - began < 60
    assert committed_tags(tmp_path) == {}


def test_a_save_that_fails_gives_it_back(run: Run, tmp_path: Path) -> None:
    (tmp_path / "best").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists at .*/best"):
        save(run, tmp_path, tag="best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.slow
def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    """Each save is whole or refused, and nothing waits.

    One is killed while it saves, and the other goes on.
    """
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(SCRIPT), str(tmp_path / "save")]
    jobs = [
        subprocess.Popen([*command, name, "12"], env=environment, stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    try:
        assert jobs[0].stdout is not None
        while "saved" not in jobs[0].stdout.readline():
            pass
        time.sleep(0.2)
        jobs[0].send_signal(signal.SIGKILL)
        out, _ = jobs[1].communicate(timeout=400)
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    said = [line.split(" ", 2) for line in out.splitlines()]
    assert jobs[1].returncode == 0
    assert all("held by process" in words[2] for words in said if words[0] == "refused")
    saved = [words[1] for words in said if words[0] == "saved"]
    assert len(saved) == 12
    held = committed_tags(tmp_path / "save")
    assert set(saved) <= held.keys()
    for tag in held:
        load_params(tmp_path / "save", tag)
    assert json.loads((tmp_path / "save" / saved[-1] / "commit.json").read_text())["is_latest"]
