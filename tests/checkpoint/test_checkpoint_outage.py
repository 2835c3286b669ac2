"""Storage that fails in the middle.

The save is told as failed, no checkpoint is lost, and the next one works.
"""

import errno
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, assert_holds, make_run
from _storage import Storage

from jaxpipe.checkpoint import (
    _store,
    _writer,
    committed_tags,
    export_safetensors,
    find_checkpoint,
    inspect_checkpoint,
    load_params,
    load_safetensors,
    verify_checkpoint,
)
from jaxpipe.errors import CheckpointError

# Where one array cannot be written, Orbax leaves the writing of the others alone, which then end in
# a closed loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

MOMENTS = 9


@pytest.fixture(scope="module")
def runs() -> dict[bool, Run]:
    """By whether it saves in the background."""
    return {
        background: make_run(checkpoint={"async_save": background}) for background in (False, True)
    }


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(_writer, "_CLEANING_S", 0.2)
    return Storage(tmp_path, monkeypatch)


def save(run: Run, path: Path, tag: str) -> None:
    run.engine.save_checkpoint(path, tag)
    run.engine.wait_for_checkpoint()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("background", "number", "moments"),
    sweep(
        1,
        [
            (False, errno.EIO, range(0, MOMENTS, 3)),
            (False, errno.EIO, range(MOMENTS)),
            (True, errno.ESTALE, range(MOMENTS)),
        ],
        unpack=True,
    ),
    ids=["three", "foreground", "background"],
)
def test_an_outage_at_any_moment_of_a_save(
    runs: dict[bool, Run],
    tmp_path: Path,
    storage: Storage,
    background: bool,
    number: int,
    moments: range,
) -> None:
    run = runs[background]
    save(run, tmp_path, "one")
    with storage.failing(lambda *_: 0):
        save(run, tmp_path, "two")
    num_calls = len(storage.calls)
    assert num_calls > 80
    for i in moments:
        run.train(1)
        held, before = run.held(), committed_tags(tmp_path)
        with storage.out(num_calls * i // MOMENTS, number), pytest.raises(CheckpointError):
            save(run, tmp_path, "two")
        assert committed_tags(tmp_path) == before
        for tag in before:
            verify_checkpoint(tmp_path, tag)
        save(run, tmp_path, "two")
        run.train(1)
        run.engine.load_checkpoint(tmp_path, "two")
        assert_holds(run, held)


def test_an_outage_of_which_only_the_end_of_a_save_is_struck(
    runs: dict[bool, Run], tmp_path: Path, storage: Storage
) -> None:
    """Whether the commit outlasts a loss of power is not known then."""
    save(runs[False], tmp_path, "one")
    runs[False].train(1)

    def fails(name: str, path: str, number: int) -> int:
        is_commit = ("replace", f"{tmp_path}/one/commit.json.partial") in storage.calls
        return errno.EIO if is_commit and (name, path) == ("fsync", f"{tmp_path}/one") else 0

    with (
        storage.failing(fails),
        pytest.raises(CheckpointError, match="/one was written, but may be lost in a power"),
    ):
        save(runs[False], tmp_path, "one")
    assert committed_tags(tmp_path)["one"].global_steps == runs[False].engine.global_steps
    verify_checkpoint(tmp_path, "one")


def test_a_commit_names_what_is_on_disk(
    runs: dict[bool, Run], tmp_path: Path, storage: Storage
) -> None:
    """Every file of the data, then every folder, then the commit."""
    path = tmp_path / "new" / "save"
    with storage.failing(lambda *_: 0):
        save(runs[False], path, "one")
    calls = [(name, Path(each)) for name, each in storage.calls]
    commit = calls.index(("replace", path / "one" / "commit.json.partial"))
    synced = [each for name, each in calls[:commit] if name == "fsync"]
    (data,) = (path / "one").glob("data-*")
    inside = list(data.rglob("*"))
    files = {each for each in inside if each.is_file()}
    folders = {each for each in inside if each.is_dir()} | {
        data,
        path / "one",
        path,
        path.parent,
        tmp_path,
    }
    assert len(files) > 5
    assert (files | folders) <= {*synced}
    last = [len(synced) - synced[::-1].index(each) for each in folders - {tmp_path, path.parent}]
    assert min(last) > max(synced.index(each) for each in files if each.name != "index.json")
    assert ("fsync", path / "one" / "commit.json.partial") in calls[:commit]


def test_folders_that_fail_to_be_synced_are_told_of(
    runs: dict[bool, Run], tmp_path: Path, storage: Storage
) -> None:
    save(runs[False], tmp_path, "one")
    before = committed_tags(tmp_path)

    def fails(name: str, path: str, number: int) -> int:
        return errno.EIO if name == "fsync" and "/data-" in path and Path(path).is_dir() else 0

    with (
        storage.failing(fails),
        pytest.raises(CheckpointError, match="/one could not be written: .*Input/output err"),
    ):
        save(runs[False], tmp_path, "one")
    assert committed_tags(tmp_path) == before

    def has_none(name: str, path: str, number: int) -> int:
        return errno.EINVAL if name == "fsync" and Path(path).is_dir() else 0

    with storage.failing(has_none):  # not every file system has something to sync
        save(runs[False], tmp_path, "one")


READERS: dict[str, Callable[[Run, Path], Any]] = {
    "load": lambda run, path: run.engine.load_checkpoint(path / "save"),
    "find": lambda run, path: find_checkpoint(path / "save", "one"),
    "params": lambda run, path: load_params(path / "save"),
    "tags": lambda run, path: committed_tags(path / "save"),
    "verify": lambda run, path: verify_checkpoint(path / "save"),
    "inspect": lambda run, path: inspect_checkpoint(path / "save"),
    "export": lambda run, path: export_safetensors(
        path / "save", path / "again" / "model.safetensors"
    ),
    "safetensors": lambda run, path: load_safetensors(path / "model.safetensors"),
}


@pytest.mark.filterwarnings("ignore:Passed over. .*/latest must be a readable text")
@pytest.mark.parametrize("reader", READERS)
def test_an_outage_while_a_checkpoint_is_read(
    runs: dict[bool, Run], tmp_path: Path, storage: Storage, reader: str
) -> None:
    run = runs[False]
    save(run, tmp_path / "save", "one")
    export_safetensors(tmp_path / "save", tmp_path / "model.safetensors")
    held = run.held()
    with storage.failing(lambda *_: 0):
        READERS[reader](run, tmp_path)
    num_calls = len(storage.calls)
    failures = []
    for begin in {*range(min(num_calls, 12)), *range(0, num_calls, max(num_calls // 12, 1))}:
        with storage.out(begin):
            try:
                READERS[reader](run, tmp_path)
            except CheckpointError as error:
                failures.append(str(error))
        assert_holds(run, held)
    assert len(failures) > 0
    assert all("must stay while they are read" not in failure for failure in failures)
    assert any("Input/output error" in failure for failure in failures)
    READERS[reader](run, tmp_path)


def test_what_failed_is_said_once(
    runs: dict[bool, Run],
    tmp_path: Path,
    storage: Storage,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Not by each thread of Orbax too."""
    save(runs[False], tmp_path, "one")
    with storage.failing(lambda *_: 0):
        save(runs[False], tmp_path, "one")
    first = next(i for i, (_, path) in enumerate(storage.calls) if "/arrays" in path)
    with (
        caplog.at_level(logging.INFO),
        storage.out(first + 8),
        pytest.raises(CheckpointError) as caught,
    ):
        save(runs[False], tmp_path, "one")
    assert len(traceback.format_exception(caught.value)) < 40
    assert "Traceback" not in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_only_late_writes_of_orbax_are_kept_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", shown.append)
    _store._orbax.__wrapped__()  # as the first save does
    late = SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), object=None)
    others = [
        SimpleNamespace(exc_value=RuntimeError("a user's own"), object=None),
        SimpleNamespace(exc_value=RuntimeError("Event loop is closed"), object=shown),
        SimpleNamespace(exc_value=ValueError("Event loop is closed"), object=None),
    ]
    for report in (late, *others):
        sys.unraisablehook(report)  # type: ignore[arg-type]
    assert shown == others
