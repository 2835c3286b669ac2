"""Standard output and standard error of the launcher, written without waiting for a reader."""

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

# Bytes that wait for a slow reader; beyond them the processes wait too, as they would at a pipe.
_BUFFER_BYTES = 1 << 20
# Bytes that wait while the job ends, when output must not delay any process.
_ENDING_BUFFER_BYTES = 64 << 20
# Bytes of one write; small, so that a slow reader is known from one that has stopped.
_PIECE_BYTES = 4096
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Target:
    """A stream of this process that a thread of its own writes.

    A reader who stops reading (Ctrl-S in a terminal, a pager that waits) so stops that thread and
    nothing else. A reader who is gone is left alone. `stream` is None where the launcher was
    started without one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_gone = stream is None
        self._is_over = False
        self._lost_bytes, self._why_lost = 0, ""
        self._last_taken_at = time.monotonic()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            threading.Thread(target=self._write_all, name="jaxpipe-writer", daemon=True).start()

    def has_room(self) -> bool:
        """True while more should be read for it."""
        return self._num_bytes < _BUFFER_BYTES

    def put(self, data: bytes, *, may_drop: bool = False) -> None:
        """Let whole lines be written; never waits.

        With `may_drop` they are left out, and counted, where too much waits already.
        """
        with self._changed:
            if self._is_gone or not data:
                return
            if may_drop and self._num_bytes > _ENDING_BUFFER_BYTES:
                self._lose(len(data), "nobody read it")
                return
            if not self._waiting:
                self._last_taken_at = time.monotonic()
            self._waiting.append(data)
            self._num_bytes += len(data)
            self._changed.notify_all()

    def waiting_s(self) -> float | None:
        """For how long the reader has taken nothing, in seconds; None where nothing waits."""
        with self._changed:
            return time.monotonic() - self._last_taken_at if self._waiting else None

    def missing(self) -> str:
        """Clause on lines not written so far, and why.

        Empty where all were, or where the reader left.
        """
        with self._changed:
            if self._waiting:
                return (
                    f"lacks its last {self._lost_bytes + self._num_bytes} bytes, which nobody read"
                )
            return f"lacks {self._lost_bytes} bytes: {self._why_lost}" if self._lost_bytes else ""

    def close(self) -> None:
        """Write what waits, if somebody reads it, then end the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _lose(self, num_bytes: int, why: str) -> None:
        self._lost_bytes, self._why_lost = self._lost_bytes + num_bytes, why

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over)
                if not self._waiting:
                    return
                data = self._waiting[0]
            self._write(memoryview(data))
            with self._changed:
                self._num_bytes -= len(self._waiting.popleft())
                self._last_taken_at = time.monotonic()
                if self._is_gone:
                    self._waiting.clear()
                    self._num_bytes = 0
                    return

    def _write(self, data: memoryview) -> None:
        assert self._stream is not None
        try:
            try:
                descriptor = self._stream.fileno()
            except (OSError, AttributeError):  # no file behind it
                self._stream.write(bytes(data).decode(errors="replace"))
                return
            while data:
                try:
                    data = data[os.write(descriptor, data[:_PIECE_BYTES]) :]
                    self._last_taken_at = time.monotonic()
                except BlockingIOError:
                    select.select([], [descriptor], [])
        except ValueError:  # closed
            self._is_gone = True
        except OSError as error:
            with self._changed:
                self._is_gone = error.errno in _GONE
                if not self._is_gone:  # such as a full disk, which may have room again later
                    self._lose(len(data), error.strerror or str(error))


def is_same(one: TextIO | None, other: TextIO | None) -> bool:
    """True if two streams write to one file, pipe or terminal, as far as can be known."""
    try:
        return (
            one is not None
            and other is not None
            and os.path.sameopenfile(one.fileno(), other.fileno())
        )
    except (OSError, ValueError, AttributeError):
        return one is other
