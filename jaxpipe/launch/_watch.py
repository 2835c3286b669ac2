"""Detecting a process that does not finish steps."""

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
    """Watches the heartbeat files of a group.

    A running process is late if its file has not changed for `stall_timeout_s`. Before the first
    change, it is late if it has run for `start_timeout_s`. None sets no limit.
    """

    def __init__(
        self,
        members: Sequence[Member],
        stall_timeout_s: float | None,
        start_timeout_s: float | None,
    ) -> None:
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
        """Check the files, and return a sentence about the process that has been late for longest.

        A stopped process takes precedence. Returns None if no process is late.
        """
        now = time.monotonic()
        late = []
        for seen in self._all:
            changed_ns = _changed_ns(seen.path)
            if changed_ns != seen.changed_ns:
                seen.changed_ns, seen.at, seen.has_begun = changed_ns, now, True
            limit_s = self._stall_timeout_s if seen.has_begun else self._start_timeout_s
            if limit_s is not None and now - seen.at > limit_s and seen.member.exit_code() is None:
                late.append((_is_stopped(seen.member.pid), now - seen.at, seen))
        if not late:
            return None
        stopped, waited_s, seen = max(late, key=lambda one: one[:2])
        others = f" {len(late) - 1} more are late." if len(late) > 1 else ""
        return (
            self._sentence(seen, waited_s)
            + (" It is stopped by a signal." if stopped else "")
            + others
        )

    def _sentence(self, seen: _Seen, waited_s: float) -> str:
        if not seen.has_begun:
            return (
                f"{seen.member} finished no first step in {waited_s:.1f} s, longer than "
                f"--start-timeout {self._start_timeout_s:g}."
            )
        last = time.strftime("%H:%M:%S", time.localtime(seen.changed_ns / 1e9))
        return (
            f"{seen.member} finished no step for {waited_s:.1f} s, longer than --stall-timeout "
            f"{self._stall_timeout_s:g}; its last{_which(seen.path)} ended at {last}."
        )


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _which(heartbeat: Path) -> str:
    """The name of the last step that the process has written, between commas."""
    try:
        text = heartbeat.read_text().strip()
    except OSError:
        text = ""
    return f", {text}," if text else ""


def _is_stopped(pid: int) -> bool:
    """True if the system reports the process as stopped. Always False except on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
