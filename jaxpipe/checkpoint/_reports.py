"""Reports of a job's processes to process 0 about a save, as files in the save's folder.

In a background thread, processes have no other way to communicate.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe._util.stores import AnyPath, at_once

from ._copies import Hashes
from ._storage import present, send

_BEAT_S = 5.0
"""Seconds between heartbeats of a process that is writing."""
_SILENT_S = 90.0
"""Seconds without a report or heartbeat after which a process counts as failed."""
_TOLD = re.compile(r"report-.*\.json|writing-.*")
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


@contextlib.contextmanager
def still_writing(data: AnyPath) -> Generator[None]:
    """Write a heartbeat every few seconds, so that process 0 keeps waiting for this process."""
    if jax.process_index() == 0:
        yield
        return
    path = _beat_path(data, jax.process_index())
    has_ended = threading.Event()

    def beat() -> None:
        number = 0
        while True:
            # If the storage does not accept a heartbeat, the missing heartbeat reports that.
            with contextlib.suppress(OSError):
                path.write_text(str(number))
            number += 1
            if has_ended.wait(_BEAT_S):
                return

    thread = threading.Thread(target=beat, name=f"beats of {data.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


@dataclass(frozen=True)
class Report:
    """What a process has written: hashes of its blocks, and its number of chunks of arrays."""

    sha256: Hashes
    num_chunks: int


def report(
    data: AnyPath,
    error: str | None = None,
    sha256: Mapping[str, Any] | None = None,
    num_chunks: int = 0,
) -> None:
    """Report to process 0 that this process's blocks are on disk, with hashes, or why not."""
    # A message and not a part of the checkpoint, so it is not synced.
    # If syncing an existing report failed, process 0 would see success and this process a failure.
    send(
        _report_path(data, jax.process_index()),
        json.dumps({"error": error, "sha256": sha256 or {}, "num_chunks": num_chunks}),
    )


def collect(data: AnyPath, check: Callable[[], object]) -> list[Report]:
    """Return what each process reported, in order; blocks until all have reported.

    `data` is the folder of the save. `check` raises if waiting is pointless. Raises OSError if a
    process failed, has sent no heartbeat for `_SILENT_S`, or the folder is gone.
    """
    own = jax.process_index()
    missing = {index: _Silence() for index in range(jax.process_count())}
    pause_s = _SHORTEST_PAUSE_S
    while missing := _without_report(data, missing):
        check()
        if own in missing:
            raise FileNotFoundError(f"{data} was removed by somebody else while it was written")
        silent = [
            str(i)
            for i, silence in missing.items()
            if silence.lasts(_beat_path(data, i), pause_s) > _SILENT_S
        ]
        if silent:
            raise TimeoutError(
                f"process {', '.join(silent)} has written nothing to {data} for {_SILENT_S:.0f} s: "
                "its storage does not answer, or it has ended"
            )
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
    paths = [_report_path(data, i) for i in range(jax.process_count())]
    reports = at_once(lambda path: json.loads(path.read_text()), paths)
    failed = [f"process {i}: {each['error']}" for i, each in enumerate(reports) if each["error"]]
    if failed:
        raise OSError("; ".join(failed))
    return [Report(each["sha256"], each["num_chunks"]) for each in reports]


def remove_reports(data: AnyPath) -> None:
    """Remove the processes' reports, which no reader needs."""
    told = [path for path in data.iterdir() if _TOLD.fullmatch(path.name)]
    at_once(lambda path: path.unlink(), told)


def _without_report(data: AnyPath, among: Mapping[int, "_Silence"]) -> dict[int, "_Silence"]:
    found = present(data, [_report_path(data, i).name for i in among])
    return {i: silence for i, silence in among.items() if _report_path(data, i).name not in found}


class _Silence:
    """The time without a heartbeat of a process."""

    def __init__(self) -> None:
        self._last = ""
        self._silent_s = 0.0

    def lasts(self, path: AnyPath, pause_s: float) -> float:
        """Add `pause_s` and return the seconds without a heartbeat so far."""
        said = ""
        with contextlib.suppress(OSError):
            said = path.read_text()
        # Pauses and not a clock: the time in which storage blocked this process does not count.
        self._silent_s = self._silent_s + pause_s if said == self._last else 0.0
        self._last = said
        return self._silent_s


def _report_path(data: AnyPath, index: int) -> AnyPath:
    return data / f"report-{index}.json"


def _beat_path(data: AnyPath, index: int) -> AnyPath:
    return data / f"writing-{index}"
