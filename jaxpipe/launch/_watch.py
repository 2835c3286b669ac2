"""Detecting a process that does not finish steps."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ._members import Member


@dataclass
class _Seen:
    """The last observed change of a heartbeat file."""

    member: Member
    path: Path
    changed_ns: int
    at: float
    has_begun: bool = False


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
        files = [(member, member.command.heartbeat) for member in members]
        self._all = [
            _Seen(member, path, _changed_ns(path), now)
            for member, path in files
            if path is not None
        ]

    def late(self) -> str | None:
        """Return a sentence about the process that has been late longest; None if none is."""
        now = time.monotonic()
        running = [seen for seen in self._all if seen.member.exit_code() is None]
        for seen in running:
            changed_ns = _changed_ns(seen.path)
            if changed_ns != seen.changed_ns:
                seen.changed_ns = changed_ns
                seen.at = now
                seen.has_begun = True
        late = [seen for seen in running if now - seen.at > self._limit_s(seen)]
        if not late:
            return None
        # A stopped process takes precedence, even if it is not late yet: the others wait for it.
        stopped = [seen for seen in running if seen.member.is_stopped]
        worst = min(stopped or late, key=lambda seen: seen.at)
        others = len([seen for seen in late if seen is not worst])
        return (
            self._sentence(worst, now - worst.at)
            + (" It is stopped by a signal." if stopped else "")
            + (f" {others} more are late." if others else "")
        )

    def _limit_s(self, seen: _Seen) -> float:
        limit_s = self._stall_timeout_s if seen.has_begun else self._start_timeout_s
        return math.inf if limit_s is None else limit_s

    def _sentence(self, seen: _Seen, waited_s: float) -> str:
        limit = f"{self._limit_s(seen):g}"
        if not seen.has_begun:
            return (
                f"{seen.member} finished no first step in {waited_s:.1f} s "
                f"(--start-timeout {limit})."
            )
        last = time.strftime("%H:%M:%S", time.localtime(seen.changed_ns / 1e9))
        return (
            f"{seen.member} finished no step for {waited_s:.1f} s (--stall-timeout {limit}); "
            f"its last{_which(seen.path)} ended at {last}."
        )


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _which(heartbeat: Path) -> str:
    """The name of the last step that the process has written, between commas."""
    try:
        text = heartbeat.read_bytes().decode(errors="replace").strip()
    except OSError:
        text = ""
    return f", {text}," if text else ""
