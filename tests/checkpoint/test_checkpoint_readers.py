"""Readers of a directory in which another job replaces its only checkpoint all the time."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, make_engine, make_run

from jaxpipe.checkpoint import (
    CheckpointWriter,
    RunState,
    export_safetensors,
    inspect_checkpoint,
    load_collections,
    load_params,
    open_checkpoint,
    reread,
    verify_checkpoint,
)
from jaxpipe.checkpoint import _open as opening
from jaxpipe.errors import CheckpointError


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run(1500)


DOORS: dict[str, Callable[[Path], Any]] = {
    "load_params": load_params,
    "load_collections": load_collections,
    "inspect": inspect_checkpoint,
    "verify": verify_checkpoint,
    "export": lambda path: export_safetensors(path, path.with_name("out.safetensors")),
}


def save(run: Run, path: Path, step: int, tag: str | None = None) -> None:
    CheckpointWriter(keep_last=1).save(
        path, run.engine.pipeline, run.engine.state, RunState(global_steps=step), tag=tag
    )


@contextmanager
def saving(run: Run, path: Path, tag: str | None = None) -> Iterator[None]:
    stop = threading.Event()
    failed: list[Exception] = []

    def work() -> None:
        step = 1
        while not stop.wait(0.01):
            step += 1
            try:
                save(run, path, step, tag)
            except Exception as error:  # noqa: BLE001
                failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert failed == []


def read_often(
    run: Run, path: Path, door: Callable[[Path], Any], times: int, tag: str | None = None
) -> None:
    save(run, path, 1, tag)
    with saving(run, path, tag), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `latest` may lag behind at any moment
        for _ in range(times):
            door(path)


@pytest.mark.parametrize("door", sweep(2, [*DOORS.values()], rest=pytest.mark.slow), ids=DOORS)
def test_a_checkpoint_that_is_replaced_while_it_is_read(
    run: Run, tmp_path: Path, door: Callable[[Path], Any]
) -> None:
    read_often(run, tmp_path / "save", door, 8)


@pytest.mark.soak
@pytest.mark.parametrize("tag", [None, "best"])
@pytest.mark.parametrize("door", sweep(2, [*DOORS.values()], rest=pytest.mark.slow), ids=DOORS)
def test_a_checkpoint_that_is_replaced_while_it_is_read_often(
    run: Run, tmp_path: Path, door: Callable[[Path], Any], tag: str | None
) -> None:
    read_often(run, tmp_path / "save", door, 100, tag)


@pytest.mark.soak
def test_an_engine_that_reads_often(run: Run, tmp_path: Path) -> None:
    engine = make_engine(1500)
    found: list[Any] = []
    read_often(
        run, tmp_path / "save", lambda path: found.append(engine.load_checkpoint(path)[0]), 100
    )
    assert None not in found


def removed_while(run: Run, path: Path, num_steps: int) -> Callable[[], None]:
    """What replaces the checkpoint, so many times."""
    steps = iter(range(2, 2 + num_steps))

    def replace() -> None:
        step = next(steps, None)
        if step is not None:
            save(run, path, step)

    return replace


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_the_newer_checkpoint_is_read_where_the_old_one_vanished(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: Callable[[Path], Any]
) -> None:
    """Between the commit and the index, several times."""
    path, true = tmp_path / "save", opening.read_index
    save(run, path, 1)
    replace = removed_while(run, path, 3)

    def read_index(*args: Any) -> Any:
        replace()
        return true(*args)

    monkeypatch.setattr(opening, "read_index", read_index)
    door(path)
    assert [each.name for each in path.glob("global_step*")] == ["global_step4"]


def test_an_engine_reads_the_newer_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, true = tmp_path / "save", opening.read_index
    save(run, path, 1)
    replace = removed_while(run, path, 2)

    def read_index(*args: Any) -> Any:
        replace()
        return true(*args)

    monkeypatch.setattr(opening, "read_index", read_index)
    engine = make_engine(1500)
    assert engine.load_checkpoint(path) == (str(path / "global_step3"), {})
    assert engine.global_steps == 3


def test_a_directory_that_is_listed_while_its_only_checkpoint_is_replaced(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not taken for empty: a run would begin anew."""
    path = tmp_path / "save"
    save(run, path, 1)
    listed: list[Path] = []
    true = Path.iterdir

    def iterdir(self: Path) -> Any:
        found = list(true(self))
        if self == path and not listed:
            listed.append(self)
            save(run, path, 2)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert make_engine(1500).load_checkpoint(path) == (str(path / "global_step2"), {})


def test_a_damaged_commit_that_is_replaced_while_it_is_read(run: Run, tmp_path: Path) -> None:
    """The job that saves writes a whole one there."""
    save(run, tmp_path, 1, "best")
    commit = tmp_path / "best" / "commit.json"
    whole = commit.read_bytes()
    commit.write_bytes(whole[:-9])

    def read() -> str:
        try:
            return open_checkpoint(tmp_path / "best").tag
        except CheckpointError:
            commit.write_bytes(whole)
            raise

    assert reread(tmp_path / "best", read) == "best"


def test_a_tag_that_vanished_is_named(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path, 1)
    save(run, tmp_path, 2)
    with pytest.raises(
        CheckpointError,
        match="got tag='global_step1' in .* which holds the checkpoints 'global_step2'",
    ):
        load_params(tmp_path, "global_step1")


def test_a_checkpoint_that_is_replaced_at_every_reading(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_READINGS", 3)
    true = opening.read_index
    save(run, tmp_path, 1)
    replace = removed_while(run, tmp_path, 10)

    def read_index(*args: Any) -> Any:
        replace()
        return true(*args)

    monkeypatch.setattr(opening, "read_index", read_index)
    match = (
        f"got path='{tmp_path}', where they were replaced in each of 3 attempts; .* keep more with "
        "checkpoint.keep_last"
    )
    with pytest.raises(CheckpointError, match=match):
        load_params(tmp_path)
