"""What the processes of a job tell process 0 of a save, through its folder.

In a thread they share nothing else.
"""

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from jaxpipe._stores import AnyPath

from ._copies import Hashes
from ._storage import present, read_each, send

_BEAT_S = 5.0
"""Seconds after which a process that writes says that it still does."""
_SILENT_S = 90.0
"""Seconds without a word after which a process counts as failed."""
_TOLD = re.compile(r"report-.*\.json|writing-.*")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


@contextlib.contextmanager
def still_writing(data: AnyPath) -> Generator[None]:
    """Say every few seconds that this process still writes.

    So process 0 waits for it, however long that takes.
    """
    if jax.process_index() == 0:
        yield
        return
    path, has_ended = _beat_path(data, jax.process_index()), threading.Event()

    def beat() -> None:
        number = 0
        while True:
            # A storage that takes no beat is what silence means.
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


def report(
    data: AnyPath, error: str | None = None, sha256: Mapping[str, Any] | None = None
) -> None:
    """Tell process 0 that this process's blocks are on disk, with their hashes, or why not."""
    # It is a message, not a part of the checkpoint: a report that is there but could not be synced
    # would count for process 0 and as a failure here.
    send(
        _report_path(data, jax.process_index()),
        json.dumps({"error": error, "sha256": sha256 or {}}),
    )


def collect(data: AnyPath, check: Callable[[], object]) -> list[Hashes]:
    """Hashes that each process has reported, in order; waits for those that still write.

    `data` is the folder of the save. `check` raises where nothing is to wait for any more. Raises
    OSError where a process failed, has not been heard of for `_SILENT_S`, or the folder is gone.
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
    reports = read_each(paths, lambda path: json.loads(path.read_text()))
    failed = [f"process {i}: {each['error']}" for i, each in enumerate(reports) if each["error"]]
    if failed:
        raise OSError("; ".join(failed))
    return [each["sha256"] for each in reports]


def remove_reports(data: AnyPath) -> None:
    """Remove what processes have told, which no reader needs."""
    told = [path for path in data.iterdir() if _TOLD.fullmatch(path.name)]
    read_each(told, lambda path: path.unlink())


def _without_report(data: AnyPath, among: Mapping[int, "_Silence"]) -> dict[int, "_Silence"]:
    found = present(data, [_report_path(data, i).name for i in among])
    return {i: silence for i, silence in among.items() if _report_path(data, i).name not in found}


class _Silence:
    """How long a process has said nothing.

    The time in which this process itself waited for the storage does not count.
    """

    def __init__(self) -> None:
        self._last, self._silent_s = "", 0.0

    def lasts(self, path: AnyPath, pause_s: float) -> float:
        """Seconds of silence, after `pause_s` more."""
        said = ""
        with contextlib.suppress(OSError):
            said = path.read_text()
        self._silent_s = self._silent_s + pause_s if said == self._last else 0.0
        self._last = said
        return self._silent_s


def _report_path(data: AnyPath, index: int) -> AnyPath:
    return data / f"report-{index}.json"


def _beat_path(data: AnyPath, index: int) -> AnyPath:
    return data / f"writing-{index}"
