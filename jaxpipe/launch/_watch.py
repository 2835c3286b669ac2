"""Detecting a process that does not finish steps."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from ._members import Member


class StallWatch:
    """Watches the heartbeat files of a group for processes without a step in time."""

    def __init__(
        self,
        members: Sequence[Member],
        stall_timeout_s: float | None,
        start_timeout_s: float | None,
    ) -> None:
        # Seconds without a change of the file; `start_timeout_s` is until its first change.
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = start_timeout_s
        now = time.monotonic()
        # When the file of a process was last modified, 0 before its first step, and when that was
        # first seen.
        self._seen = {member: (0, now) for member in members if member.heartbeat is not None}

    def late(self) -> str | None:
        """Return a sentence about the process that has been late longest; None if none is."""
        now = time.monotonic()
        running = [member for member in self._seen if member.exit_code() is None]
        for member in running:
            changed_ns = _changed_ns(member.heartbeat)
            if changed_ns not in (0, self._seen[member][0]):
                self._seen[member] = changed_ns, now
        waited_s = {member: now - self._seen[member][1] for member in running}
        late = [member for member in running if waited_s[member] > self._limit_s(member)]
        if not late:
            return None
        # A stopped process takes precedence, even if it is not late yet: the others wait for it.
        stopped = [member for member in running if member.is_stopped]
        worst = max(stopped or late, key=waited_s.__getitem__)
        others = len([member for member in late if member is not worst])
        return (
            self._sentence(worst, waited_s[worst])
            + (" It is stopped by a signal." if stopped else "")
            + (f" {others} more are late." if others else "")
        )

    def _limit_s(self, member: Member) -> float:
        limit_s = self._stall_timeout_s if self._seen[member][0] else self._start_timeout_s
        return math.inf if limit_s is None else limit_s

    def _sentence(self, member: Member, waited_s: float) -> str:
        limit = f"{self._limit_s(member):g}"
        changed_ns, _ = self._seen[member]
        if not changed_ns:
            return f"{member} finished no first step in {waited_s:.1f} s (--start-timeout {limit})."
        last = time.strftime("%H:%M:%S", time.localtime(changed_ns / 1e9))
        return (
            f"{member} finished no step for {waited_s:.1f} s (--stall-timeout {limit}); "
            f"its last{_which(member.heartbeat)} ended at {last}."
        )


def _changed_ns(heartbeat: Path | None) -> int:
    try:
        return heartbeat.stat().st_mtime_ns if heartbeat else 0
    except OSError:
        return 0


def _which(heartbeat: Path | None) -> str:
    """The name of the last step that the process has written, between commas."""
    try:
        text = heartbeat.read_bytes().decode(errors="replace").strip() if heartbeat else ""
    except OSError:
        text = ""
    return f", {text}," if text else ""
