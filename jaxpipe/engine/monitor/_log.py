"""`MonitorLog`: passes events to monitors in a separate thread."""

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from jaxpipe._util.exit import before_exit
from jaxpipe.distributed import log

from ._event import Event, Monitor

Record = Callable[[], Sequence[Event]]
"""Makes events from arrays on the devices, and may block until they are computed."""

_MOST_WAITING = 4096
"""Maximum number of records in the queue. Each one is a few arrays of a few bytes.

Training does not wait for a monitor that hangs.
"""

_LAST_WAIT_S = 30.0
"""Seconds that the program waits at its end for the queue to be written."""


class MonitorLog:
    """Passes events to monitors in the order of their steps, without blocking training.

    If a monitor raises, for example because its disk is full or its server is gone, it is switched
    off with one warning in the log, and the others continue. Queued events are written when the
    program ends.
    """

    def __init__(self, monitors: Iterable[Monitor] = ()) -> None:
        self._worker = _Worker()
        for monitor in monitors:
            self.add(monitor)
        # The thread references the worker and not this object, so that both end with the engine.
        weakref.finalize(self, self._worker.end).atexit = False

    @property
    def is_empty(self) -> bool:
        """True if no monitor is left."""
        return not self._worker.monitors

    def add(self, monitor: Monitor) -> None:
        """Add a monitor, which receives all later events."""
        self._worker.monitors.append(monitor)

    def put(self, record: Record) -> None:
        """Queue the events that `record` makes, to be written when computed; return immediately."""
        if not self.is_empty:
            self._worker.put(record)

    def flush(self) -> None:
        """Block until all queued events have been written, and flush the monitors."""
        self._worker.waiting.join()
        self._worker.call("flush")


class _Worker:
    """The thread and its queue."""

    def __init__(self) -> None:
        self.monitors: list[Monitor] = []
        # Each record with its monitors: a monitor that is added later receives no queued records.
        self.waiting: queue.Queue[tuple[Record, Sequence[Monitor]] | None] = queue.Queue(
            _MOST_WAITING
        )
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def put(self, record: Record) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="monitors")
            self._thread.start()
            # Before JAX's own cleanup, after which there are no devices to read from.
            before_exit(self._end_and_wait, "monitors were logging the last steps")
        try:
            self.waiting.put_nowait((record, tuple(self.monitors)))
        except queue.Full:
            if not self._has_warned:
                self._has_warned = True
                log(
                    logging.WARNING,
                    "monitors must keep up with training, but %d steps wait to be written; until "
                    "there is room, new steps are not logged",
                    _MOST_WAITING,
                )

    def end(self) -> None:
        """Let the thread end after it has written the queue."""
        if self._thread is None:
            self._close()
            return
        with contextlib.suppress(queue.Full):  # a monitor hangs, and nothing should wait for it
            self.waiting.put_nowait(None)

    def _end_and_wait(self) -> None:
        thread = self._thread
        self.end()
        if thread is not None:
            thread.join(_LAST_WAIT_S)

    def _run(self) -> None:
        while True:
            waiting = self.waiting.get()
            try:
                if waiting is None:
                    self._close()
                    return
                self._write(*waiting)
            finally:
                self.waiting.task_done()

    def _write(self, record: Record, monitors: Sequence[Monitor]) -> None:
        try:
            events = record()
        # The step failed on the devices. The error is raised where its loss is read.
        except Exception:  # noqa: BLE001
            return
        for monitor in monitors:
            if monitor not in self.monitors:
                continue  # it has failed since
            try:
                monitor(events)
            # A library or a user's function may raise anything.
            except Exception as error:  # noqa: BLE001
                self.monitors.remove(monitor)
                _warn(monitor, error)

    def call(self, method: str) -> None:
        """Call a method on all monitors that have it."""
        for monitor in tuple(self.monitors):
            found = getattr(monitor, method, None)
            try:
                if callable(found):
                    found()
            except Exception as error:  # noqa: BLE001  # as above
                self.monitors.remove(monitor)
                _warn(monitor, error)

    def _close(self) -> None:
        self.call("close")
        self.monitors.clear()


def _warn(monitor: Monitor, error: Exception) -> None:
    name = getattr(monitor, "__qualname__", type(monitor).__qualname__)
    log(
        logging.WARNING,
        "the monitor %s failed and is switched off, training goes on: %s: %s",
        name,
        type(error).__name__,
        error,
    )
