"""Events reach monitors in order, and no monitor costs anybody else anything."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from _disk_store import DiskStore

from jaxpipe.config import CSVMonitorSection
from jaxpipe.engine.monitor import Event, MonitorLog
from jaxpipe.engine.monitor._csv import CSVMonitor


def test_events_come_in_order_from_another_thread() -> None:
    got: list[tuple[Event, str]] = []
    log = MonitorLog(
        [lambda events: got.extend((event, threading.current_thread().name) for event in events)]
    )
    for step in range(50):
        log.put(lambda step=step: [Event("a", step, step), Event("b", -step, step)])
    log.flush()
    assert got == [
        (Event(name, sign * i, i), "monitors")
        for i in range(50)
        for name, sign in (("a", 1), ("b", -1))
    ]


def test_putting_does_not_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.engine.monitor._log._MOST_WAITING", 2)
    may_go, got = threading.Event(), list[int]()

    def slow(events: Sequence[Event]) -> None:
        may_go.wait()
        got.append(events[0].samples)

    log = MonitorLog([slow])
    with caplog.at_level(logging.WARNING, "jaxpipe"):
        for step in range(9):
            log.put(lambda step=step: [Event("a", 0.0, step)])
    may_go.set()
    log.flush()
    assert got == sorted(got)
    assert 2 <= len(got) <= 3
    assert [record.message.startswith("monitors must keep up") for record in caplog.records] == [
        True
    ]


def test_one_that_is_added_gets_nothing_that_waits_already() -> None:
    may_go, got = threading.Event(), list[int]()
    log = MonitorLog([lambda _: None if may_go.wait() else None])
    log.put(lambda: [Event("a", 0.0, 1)])
    log.put(lambda: [Event("a", 0.0, 2)])
    log.add(lambda events: got.append(events[0].samples))
    log.put(lambda: [Event("a", 0.0, 3)])
    may_go.set()
    log.flush()
    assert got == [3]


def test_one_that_raises_is_switched_off_alone(caplog: pytest.LogCaptureFixture) -> None:
    calls, got = [], list[int]()

    def fails(events: Sequence[Event]) -> None:
        calls.append(events)
        raise OSError(28, "No space left on device")

    log = MonitorLog([fails, lambda events: got.append(events[0].samples)])
    with caplog.at_level(logging.WARNING, "jaxpipe"):
        for step in range(3):
            log.put(lambda step=step: [Event("a", 0.0, step)])
        log.put(lambda: 1 / 0)  # what cannot be read is told to who waits for it
        log.flush()
    assert (len(calls), got) == (1, [0, 1, 2])
    (record,) = caplog.records
    assert (
        "fails failed and is switched off, training goes on: OSError: [Errno 28] No space"
        in record.message
    )


def test_a_log_that_is_dropped_closes_its_monitors(tmp_path: Path) -> None:
    closed = threading.Event()

    class Closing(CSVMonitor):  # type: ignore[misc]
        def close(self) -> None:
            closed.set()

    log = MonitorLog([Closing(CSVMonitorSection(True, str(tmp_path), "job"))])
    log.put(lambda: [Event("Train/Samples/a b", 2.5, 8)])
    del log
    assert closed.wait(10)
    assert (tmp_path / "job" / "Train_Samples_a_b.csv").read_text().split() == [
        "step,a",
        "b",
        "8,2.5",
    ]


@pytest.mark.slow
def test_what_waits_at_the_end_of_the_program_is_written() -> None:
    program = """
import time, jax.numpy as jnp
from jaxpipe.engine.monitor import Event, MonitorLog
class Prints:
    def __call__(self, events): time.sleep(0.1); print(events[0].value, flush=True)
    def close(self): print("closed", flush=True)
log = MonitorLog([Prints()])
for step in range(3):
    log.put(lambda array=jnp.float32(step): [Event("a", float(array), 0)])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (["0.0", "1.0", "2.0", "closed"], "")


def test_a_store_has_what_was_flushed_and_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    section = CSVMonitorSection(True, f"{DiskStore.protocol}://{tmp_path}/runs", "job")
    file = tmp_path / "runs" / "job" / "a.csv"
    for begin, wanted in ((0, ["step,a", "0,0.0"]), (1, ["step,a", "0,0.0", "1,0.0", "2,0.0"])):
        log = MonitorLog([CSVMonitor(section)])
        log.put(lambda begin=begin: [Event("a", 0.0, begin)])
        assert not file.exists() or file.read_text().split() == wanted[: begin + 1]
        log.flush()
        assert file.read_text().split() == wanted[: begin + 2]
        if begin:
            log.put(lambda: [Event("a", 0.0, 2)])
            with DiskStore.hooked(None):
                del log
                while file.read_text().split() != wanted:
                    time.sleep(0.01)
                assert [name for name, _ in DiskStore.calls if name == "put"] == ["put"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["", pytest.param("/sub", marks=pytest.mark.slow)])
def test_a_store_has_everything_when_the_program_ends(tmp_path: Path, job: str) -> None:
    program = f"""
from _disk_store import DiskStore
from jaxpipe.config import CSVMonitorSection, TensorBoardSection
from jaxpipe.engine.monitor import Event, MonitorLog
from jaxpipe.engine.monitor._csv import CSVMonitor
from jaxpipe.engine.monitor._tensorboard import TensorBoardMonitor
url = "disk://{tmp_path}/runs{job}"
log = MonitorLog([
    CSVMonitor(CSVMonitorSection(True, url, "job")),
    TensorBoardMonitor(TensorBoardSection(True, url, "board")),
])
for step in range(3):
    log.put(lambda step=step: [Event("a", float(step), step)])
"""
    tests = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}", "TMPDIR": str(tmp_path)},
    )
    runs = Path(f"{tmp_path}/runs{job}")
    assert (runs / "job" / "a.csv").read_text().split() == ["step,a", "0,0.0", "1,1.0", "2,2.0"]
    assert [path.name[:8] for path in (runs / "board").iterdir()] == ["events.o"]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_store_that_fails_ends_its_monitor_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(number: int, name: str, path: str, is_done: bool) -> None:
        raise ConnectionError("no route")

    log = MonitorLog([CSVMonitor(CSVMonitorSection(True, f"disk://{tmp_path}", "job"))])
    log.put(lambda: [Event("a", 0.0, 0)])
    with DiskStore.hooked(fails), caplog.at_level(logging.WARNING, "jaxpipe"):
        log.flush()
    (record,) = caplog.records
    assert "CSVMonitor failed and is switched off, training goes on: StoreError" in record.message
    assert log.is_empty
