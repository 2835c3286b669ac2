"""Processes tell process 0 of a save through its folder."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from jaxpipe.checkpoint import _reports
from jaxpipe.checkpoint._reports import Report, collect, remove_reports, report, still_writing


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_reports, "_BEAT_S", 0.05)
    monkeypatch.setattr(_reports, "_SILENT_S", 1.0)
    report(tmp_path, sha256={"a": {"0": ["x"]}})
    return tmp_path


def as_process_1(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        action()


@pytest.mark.slow
def test_a_process_that_still_writes_is_waited_for(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_index", lambda: 1)
        with still_writing(data):
            patch.setattr(jax, "process_index", lambda: 0)
            thread = threading.Thread(target=lambda: found.append(collect(data, lambda: None)))
            thread.start()
            time.sleep(3.0)  # three times as long as silence may last
            assert found == []
        as_process_1(lambda: report(data, sha256={"b": {"1": ["y"]}}, num_chunks=2), monkeypatch)
        thread.join()
    assert found == [[Report({"a": {"0": ["x"]}}, 0), Report({"b": {"1": ["y"]}}, 2)]]
    assert (data / "writing-1").exists()
    remove_reports(data)
    assert list(data.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_is_silent_is_not(data: Path) -> None:
    (data / "writing-1").write_text("7")
    with pytest.raises(
        TimeoutError,
        match=rf"^process 1 has written nothing to {data} for 1 s: its storage does not",
    ):
        collect(data, lambda: None)


def test_what_failed_is_told(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_process_1(lambda: report(data, error="OSError: no room"), monkeypatch)
    with pytest.raises(OSError, match=r"^process 1: OSError: no room$"):
        collect(data, lambda: None)


def test_what_the_caller_checks_ends_the_waiting(data: Path) -> None:
    def check() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        collect(data, check)
