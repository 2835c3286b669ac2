"""Writing the launcher's standard output and standard error without blocking on a reader."""

import contextlib
import errno
import os
import select
import threading
import time
from queue import SimpleQueue
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
        # None if the launcher was started without it, or its reader is gone.
        self._stream = stream
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_bytes = 0
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

    def put(self, data: bytes) -> None:
        """Queue whole lines to be written. They are dropped and counted if far too many wait."""
        with self._lock:
            if self._num_bytes > _ENDING_BUFFER_BYTES:
                self._lose(len(data), "nobody read it")
                return
            if not self._num_bytes:
                self._last_taken_at = time.monotonic()
            self._num_bytes += len(data)
        self._waiting.put(data)

    def waiting_s(self) -> float | None:
        """Seconds since the reader last read anything, or None if the queue is empty."""
        with self._lock:
            return time.monotonic() - self._last_taken_at if self._num_bytes else None

    def missing(self) -> str:
        """A clause about output that has not been written, and why; empty if there is none."""
        with self._lock:
            if self._num_bytes:
                return (
                    f"lacks its last {self._lost_bytes + self._num_bytes} bytes, which nobody read"
                )
            return f"lacks {self._lost_bytes} bytes: {self._why_lost}" if self._lost_bytes else ""

    def close(self) -> None:
        """Let the thread write the queue, if there is a reader, and then end."""
        self._waiting.put(None)

    def _lose(self, num_bytes: int, why: str) -> None:
        self._lost_bytes += num_bytes
        self._why_lost = why

    def _write_all(self) -> None:
        for data in iter(self._waiting.get, None):
            self._write(memoryview(data))
            with self._lock:
                self._num_bytes -= len(data)
                self._last_taken_at = time.monotonic()

    def _write(self, data: memoryview) -> None:
        if self._stream is None:
            return
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
            self._stream = None
        except OSError as error:
            if error.errno in _GONE:
                self._stream = None
            else:  # for example a full disk, which may have room again later
                with self._lock:
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
