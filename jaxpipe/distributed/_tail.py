"""The last lines that a process wrote to standard error."""

import re

WAITS_AT_ITS_END = "has come to its end and waits for the others, which have not"
"""Said by a process that ended its program early, as after `sys.exit`.

JAX ends them all 30 s later.
"""

# What JAX says when it ends a process with SIGABRT because another is gone (0.10.2). With other
# words such a process would be taken for one that failed by itself.
_ENDED_BY_JAX = b"JAX distributed service detected fatal errors"
_KEPT_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last)"
_TROUBLE = re.compile(f"{re.escape(_TRACEBACK)}|{WAITS_AT_ITS_END}".encode())
_LONGEST = max(len(_TRACEBACK), len(WAITS_AT_ITS_END))
# With more lines after it than these, a traceback is taken for one that the process recovered from.
_RECENT_LINES = 60
_FRAME_LINES = 4
_ERROR_LINES = 8
_OTHER_LINES = 5


class Tail:
    """The end of what a process wrote to standard error.

    Attributes:
        trouble_at: When its last traceback began, by the monotonic clock; None where there was
            none.
    """

    def __init__(self) -> None:
        self._kept = b""
        self.trouble_at: float | None = None

    def add(self, data: bytes, at: float) -> None:
        """Take what comes next.

        Args:
            data: The bytes as they were written.
            at: When they were seen.
        """
        before = self._kept[-_LONGEST:]
        if any(match.end() > len(before) for match in _TROUBLE.finditer(before + data)):
            self.trouble_at = at
        self._kept = (self._kept + data)[-_KEPT_BYTES:]

    @property
    def was_ended_by_jax(self) -> bool:
        """True if JAX ended the process because another was gone."""
        return _ENDED_BY_JAX in self._kept

    def last_error(self) -> list[str]:
        """The end of the last traceback, with the frame that raised; else the last lines of all.

        Returns:
            Lines without their ends; none where nothing was written.
        """
        lines = re.split(r"\r\n|\r|\n", self._kept.decode(errors="replace").strip())
        first = max((i for i, line in enumerate(lines) if _TRACEBACK in line), default=None)
        if first is None or len(lines) - first > _RECENT_LINES:
            return [line for line in lines[-_OTHER_LINES:] if line.strip()]
        frames = next(
            (i for i in range(first + 1, len(lines)) if not lines[i].startswith(" ")), len(lines)
        )
        return lines[max(first + 1, frames - _FRAME_LINES) : frames + _ERROR_LINES]
