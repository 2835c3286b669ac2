"""Writing the launcher's standard output and standard error without blocking on a reader."""

import contextlib
import errno
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

# Bytes that are buffered for a slow reader. Beyond them the processes block, as at any pipe.
_BUFFER_BYTES = 1 << 20
# Bytes that are buffered while the job ends, when output must not delay any process.
_ENDING_BUFFER_BYTES = 64 << 20
# Bytes of one write. They are few, so that a slow reader differs from one that has stopped.
_PIECE_BYTES = 4096
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Target:
    """A stream of this process, written by a separate thread."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._changed = threading.Condition()
        # If the launcher was started without that stream.
        self._is_gone = stream is None
        self._is_over = False
        self._lost_bytes = 0
        self._why_lost = ""
        self._last_taken_at = time.monotonic()
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
            # A reader that stops reading (Ctrl-S in a terminal, a waiting pager) blocks only this
            # thread. If the reader is gone, output is discarded.
            threading.Thread(target=self._write_all, name="jaxpipe-writer", daemon=True).start()

    def has_room(self) -> bool:
        """True while more output should be read for this stream."""
        return self._num_bytes < _BUFFER_BYTES

    def put(self, data: bytes, *, may_drop: bool = False) -> None:
        """Queue whole lines to be written; `may_drop` counts and drops them if too many wait."""
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
        """Seconds since the reader last read anything, or None if the queue is empty."""
        with self._changed:
            return time.monotonic() - self._last_taken_at if self._waiting else None

    def missing(self) -> str:
        """A clause about output that has not been written, and why; empty if there is none."""
        with self._changed:
            if self._waiting:
                return (
                    f"lacks its last {self._lost_bytes + self._num_bytes} bytes, which nobody read"
                )
            return f"lacks {self._lost_bytes} bytes: {self._why_lost}" if self._lost_bytes else ""

    def close(self) -> None:
        """Let the thread write the queue, if there is a reader, and then end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _lose(self, num_bytes: int, why: str) -> None:
        self._lost_bytes = self._lost_bytes + num_bytes
        self._why_lost = why

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
                if not self._is_gone:  # for example a full disk, which may have room again later
                    self._lose(len(data), error.strerror or str(error))


def is_same(one: TextIO | None, other: TextIO | None) -> bool:
    """True if two streams are known to write to the same file, pipe or terminal."""
    try:
        return (
            one is not None
            and other is not None
            and os.path.sameopenfile(one.fileno(), other.fileno())
        )
    except (OSError, ValueError, AttributeError):
        return one is other
