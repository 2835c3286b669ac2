"""What the processes write, line by line, behind a prefix."""

import contextlib
import os
import re
import select
import selectors
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

# A carriage return ends a line too, as progress bars write them. One at the very end may be half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_CHUNK = 65536
_LONGEST = 1 << 20
_CLOSING_S = 2.0


@dataclass
class _Source:
    """One pipe of one process."""

    pipe: IO[bytes]
    prefix: bytes
    target: "_Target"
    log: IO[bytes] | None
    pending: bytes = b""

    def lines(self, data: bytes) -> bytes:
        """The whole lines that are there after some more bytes, each behind the prefix."""
        text = self.pending + data
        out, begin = [], 0
        for match in _END.finditer(text, max(len(self.pending) - 1, 0)):  # what was looked through has no end
            line, begin = text[begin : match.start()], match.end()
            if line or match[0] != b"\r":
                out.append(self.prefix + line + b"\n")
        self.pending = text[begin:]
        if len(self.pending) > _LONGEST:
            out.append(self.rest())
        return b"".join(out)

    def rest(self) -> bytes:
        """The last line, which nothing ended."""
        text, self.pending = self.pending.rstrip(b"\r"), b""
        return self.prefix + text + b"\n" if text else b""


class _Target:
    """This process's standard output or standard error; one that nobody reads any more is left alone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = True
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

    def write(self, data: bytes) -> None:
        if not self._is_open or not data:
            return
        try:
            try:
                descriptor = self._stream.fileno()
            except (OSError, AttributeError):  # no file behind it
                self._stream.write(data.decode(errors="replace"))
                return
            while data:
                try:
                    data = data[os.write(descriptor, data) :]
                except BlockingIOError:
                    select.select([], [descriptor], [])
        except (OSError, ValueError):
            self._is_open = False


@dataclass
class Output:
    """Copies what processes write to this process's standard output and standard error.

    Lines are never mixed: one thread reads all pipes and writes whole lines only. A last line without an end is
    written when its process closes the pipe. A pipe that a process left open to a process of another group is given
    up two seconds after `close`.

    Args:
        log_dir: A folder in which each process has a file of its own too, as it wrote it.
        append: Whether the files are continued.
        own_label: What stands in brackets before the launcher's own lines.
    """

    log_dir: Path | None = None
    append: bool = False
    own_label: str = "launch"
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sources: list[_Source] = field(default_factory=list)
    _logs: list[IO[bytes]] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _give_up_at: float | None = None

    def __post_init__(self) -> None:
        self._out, self._err = _Target(sys.stdout), _Target(sys.stderr)
        if self.log_dir is not None:
            self.log_dir.mkdir(parents=True, exist_ok=True)

    def add(self, stdout: IO[bytes], stderr: IO[bytes], label: str, file_name: str) -> None:
        """Take the pipes of a process; before `start`.

        Args:
            stdout: Its standard output.
            stderr: Its standard error.
            label: What stands in brackets before each line; "" for nothing.
            file_name: Its file in `log_dir`.
        """
        log = None
        if self.log_dir is not None:
            log = (self.log_dir / file_name).open("ab" if self.append else "wb", buffering=0)
            self._logs.append(log)
        prefix = f"[{label}] ".encode() if label else b""
        self._sources += [_Source(stdout, prefix, self._out, log), _Source(stderr, prefix, self._err, log)]

    def start(self) -> None:
        """Begin to copy."""
        self._thread = threading.Thread(target=self._copy, name="jaxpipe-output", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to standard error.

        Args:
            text: The line.
        """
        with self._lock:
            self._err.write(f"[{self.own_label}] {text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Wait until all is copied, at most two seconds."""
        self._give_up_at = time.monotonic() + _CLOSING_S
        if self._thread is not None:
            self._thread.join()
        for source in self._sources:
            source.pipe.close()
        for log in self._logs:
            log.close()

    def _copy(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in self._sources:
                selector.register(source.pipe, selectors.EVENT_READ, source)
            while selector.get_map():
                for key, _ in selector.select(timeout=0.1):
                    source: _Source = key.data
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(source.pipe)
                    self._pass_on(source, data)
                if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                    break
            for source in self._sources:
                self._pass_on(source, b"")

    def _pass_on(self, source: _Source, data: bytes) -> None:
        if source.log is not None and data:
            with contextlib.suppress(OSError):
                source.log.write(data)
        with self._lock:
            source.target.write(source.lines(data) if data else source.rest())
