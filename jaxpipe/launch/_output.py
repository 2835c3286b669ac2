"""Copying the output of the processes line by line, with a prefix."""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from jaxpipe._util.files import open_to_append
from jaxpipe.distributed import Tail
from jaxpipe.errors import LaunchError

from ._target import Target, is_same

# A carriage return also ends a line, because progress bars write them. One at the very end may be
# the first half of "\r\n".
_END = re.compile(rb"(\r\n|\n|\r(?=[^\n]))")
_CHUNK = 65536
_LONGEST = 1 << 20
_POLL_S = 0.1
_ROOM_POLL_S = 0.01
_CLOSING_S = 2.0
_PATIENCE_S = 10.0
_STUCK_S = 60.0


class _Log:
    """A process's file in `log_dir`. A failure to write is reported once and ends nothing."""

    def __init__(self, path: Path, append: bool, say: Callable[[str], None]) -> None:
        self._path = path
        self._append = append
        self._say = say
        self._has_failed = False
        self._file: IO[bytes] | None = None

    def write(self, data: bytes) -> None:
        if self._has_failed:
            return
        try:
            if self._file is None:
                self._file = open_to_append(self._path, anew=not self._append)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._has_failed = True
            self._say(
                f"{self._path} cannot be written: {error.strerror}. It lacks lines from here on."
            )

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


@dataclass
class _Source:
    """One pipe of one process."""

    pipe: IO[bytes]
    prefix: bytes
    target: Target
    log: _Log | None
    tail: Tail | None = None
    pending: bytes = b""

    def lines(self, data: bytes) -> bytes:
        """The lines that more bytes complete, each with the prefix. No bytes complete the last."""
        parts = _END.split(self.pending + data)
        self.pending = parts.pop()
        lines = [
            line for line, end in zip(parts[::2], parts[1::2], strict=True) if line or end != b"\r"
        ]
        rest = self.pending.rstrip(b"\r")
        if rest and (not data or len(rest) > _LONGEST):
            lines.append(rest)
            self.pending = b""
        return b"".join(self.prefix + line + b"\n" for line in lines)


class Output:
    """A context manager that copies the processes' standard output and standard error.

    Lines are never mixed: one thread reads all pipes and passes on whole lines, and each stream has
    one thread that writes. While the job runs, a slow reader blocks the processes, as at any pipe.
    When the job ends, only `drain`, the last call of the launcher, waits for the reader. A last
    line without a line ending is written when its process closes the pipe. If a process leaves its
    pipe open in a process of another group, the pipe is abandoned two seconds after `close`.

    In `log_dir` the unchanged output of each process is also written to its own file. With `append`
    existing files are continued. From the second group on they always are. `own_label` is the
    prefix in brackets of the launcher's own lines.
    """

    def __init__(
        self, log_dir: Path | None = None, *, append: bool = False, own_label: str = "launch"
    ) -> None:
        self._log_dir = log_dir
        self._append = append
        self._own_label = own_label
        self._sources: list[_Source] = []
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._give_up_at: float | None = None
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"--log-dir must be a folder that can be made, but got {log_dir}: "
                    f"{error.strerror}. Give the path of another."
                ) from error
        # Two streams of one terminal or pipe share a writer, which keeps the order of the lines.
        self._out = Target(sys.stdout)
        self._err = self._out if is_same(sys.stdout, sys.stderr) else Target(sys.stderr)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: object) -> None:
        for target in (self._out, self._err):
            target.close()

    def add(self, stdout: IO[bytes], stderr: IO[bytes], label: str, file_name: str) -> Tail:
        """Add the pipes of a process, before `start`; return the tail of its standard error."""
        log = (
            None
            if self._log_dir is None
            else _Log(self._log_dir / file_name, self._append, self.say)
        )
        prefix = f"[{label}] ".encode() if label else b""
        tail = Tail()
        self._sources += [
            _Source(stdout, prefix, self._out, log),
            _Source(stderr, prefix, self._err, log, tail),
        ]
        return tail

    def start(self) -> None:
        """Start copying."""
        self._is_ending = False
        self._give_up_at = None
        self._thread = threading.Thread(target=self._copy, name="jaxpipe-output", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Write the launcher's own lines to standard error, without blocking."""
        lines = [f"[{self._own_label}] {line}\n" for line in text.splitlines()]
        self._err.put("".join(lines).encode(errors="replace"))

    def release(self) -> None:
        """Stop blocking processes on slow readers, so that each process can end."""
        self._is_ending = True

    def close(self) -> None:
        """Wait until all output of the processes is read; what is unwritten stays in memory."""
        self._is_ending = True
        self._give_up_at = time.monotonic() + _CLOSING_S
        if self._thread is not None:
            self._thread.join(_STUCK_S)
        # For example, a file in `log_dir` is on a dead disk.
        if self._thread is not None and self._thread.is_alive():
            self.say(
                f"Copying the output of the processes took longer than {_STUCK_S:g} s; the rest is "
                "lost."
            )
        else:
            for source in self._sources:
                source.pipe.close()
                if source.log is not None:
                    source.log.close()
        self._sources = []
        self._thread = None
        self._append = True

    def drain(self, must_end: Callable[[bool], bool]) -> None:
        """Wait until all output that was read has been written, or `must_end` returns True.

        `must_end` is called repeatedly, with True if the reader has read nothing for ten seconds.
        """
        self._wait_for_readers(must_end)
        for name, target in (("standard error", self._err), ("standard output", self._out)):
            if missing := target.missing():
                self.say(f"The launcher's {name} {missing}.")
        self._wait_for_readers(must_end)

    def _wait_for_readers(self, must_end: Callable[[bool], bool]) -> None:
        while True:
            waited_s = [target.waiting_s() for target in (self._out, self._err)]
            waiting = [each for each in waited_s if each is not None]
            if not waiting or must_end(min(waiting) > _PATIENCE_S):
                return
            time.sleep(_POLL_S)

    def _copy(self) -> None:
        sources = {source.pipe.fileno(): source for source in self._sources}
        while sources:
            ready = [pipe for pipe in wait(sources, _POLL_S) if isinstance(pipe, int)]
            for pipe in ready:
                data = os.read(pipe, _CHUNK)
                self._pass_on(sources[pipe], data)
                if not data:
                    del sources[pipe]
            if not ready and self._give_up_at is not None and time.monotonic() > self._give_up_at:
                break
        for source in sources.values():
            self._pass_on(source, b"")

    def _pass_on(self, source: _Source, data: bytes) -> None:
        if source.tail is not None:
            source.tail.add(data, time.monotonic())
        if source.log is not None:
            source.log.write(data)
        # Until there is room the pipes fill up, which blocks the processes.
        while not self._is_ending and not source.target.has_room():
            time.sleep(_ROOM_POLL_S)
        source.target.put(source.lines(data))
