"""The last lines that a process wrote to standard error."""

import re

WAITS_AT_ITS_END = "has come to its end and waits for the others, which have not"
"""Printed by a process whose program ended early, for example with `sys.exit`.

JAX ends all processes 30 s later.
"""

# JAX's message when it ends a process with SIGABRT because another one is gone (0.10.2). If the
# wording changes, such a process counts as one that failed by itself.
_ENDED_BY_JAX = b"JAX distributed service detected fatal errors"
_KEPT_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last)"
_TROUBLE = re.compile(f"{re.escape(_TRACEBACK)}|{WAITS_AT_ITS_END}".encode())
_LONGEST = max(len(_TRACEBACK), len(WAITS_AT_ITS_END))
# If more lines than these follow a traceback, the process is assumed to have recovered from it.
_RECENT_LINES = 60
_FRAME_LINES = 4
_ERROR_LINES = 8
_OTHER_LINES = 5


class Tail:
    """The last output of a process on standard error."""

    def __init__(self) -> None:
        self._kept = b""
        # When its last traceback began, by the monotonic clock.
        self.trouble_at: float | None = None

    def add(self, data: bytes, at: float) -> None:
        """Append output that was read at a time of the monotonic clock."""
        before = self._kept[-_LONGEST:]
        if any(match.end() > len(before) for match in _TROUBLE.finditer(before + data)):
            self.trouble_at = at
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    @property
    def was_ended_by_jax(self) -> bool:
        """True if JAX ended the process because another process was gone."""
        return _ENDED_BY_JAX in self._kept

    def last_error(self) -> list[str]:
        """The end of the last traceback, with the frame that raised, else the last lines."""
        lines = re.split(r"\r\n|\r|\n", self._kept.decode(errors="replace").strip())
        trouble = [i for i, line in enumerate(lines) if _TROUBLE.search(line.encode())]
        first = trouble[-1] if trouble else None
        # What follows it is the stack of JAX's threads.
        if first is not None and WAITS_AT_ITS_END in lines[first]:
            return [lines[first]]
        if first is None or len(lines) - first > _RECENT_LINES:
            return [line for line in lines[-_OTHER_LINES:] if line.strip()]
        frames = next(
            (i for i in range(first + 1, len(lines)) if not lines[i].startswith(" ")), len(lines)
        )
        return lines[max(first + 1, frames - _FRAME_LINES) : frames + _ERROR_LINES]
