"""Running a group of processes to its end: all finish, or all are ended."""

import contextlib
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ._commands import Command
from ._members import Guard, Member, allow_files
from ._output import Output
from ._stop import Stop, StopRequests
from ._watch import StallWatch

STALLED = 124
"""Exit code after a stall, the same as that of `timeout`."""

_POLL_S = 0.02
# Delay between the first observed failure and the decision about its cause. A scheduler that
# signals every process also signals this one, and a process that JAX ends because another one is
# gone may be reaped before that other one.
_SETTLE_S = 0.5
_NODE_MARGIN_S = 10.0


@dataclass(frozen=True)
class Limits:
    """Time limits of a group, and its number of restarts; None sets no limit."""

    # From a SIGTERM that the launcher passes on to SIGKILL.
    grace_s: float = 30.0
    # The same after a failure, a stall or an interrupt.
    kill_grace_s: float = 5.0
    # Between two steps of a process.
    stall_timeout_s: float | None = None
    # Until the first step of a process.
    start_timeout_s: float | None = None
    max_restarts: int = 0


class Group:
    """Processes that are started together, here or through launchers on other nodes."""

    def __init__(
        self, commands: Sequence[Command], limits: Limits, requests: StopRequests, output: Output
    ) -> None:
        self._commands = commands
        self._limits = limits
        self._requests = requests
        self._output = output
        self._members: list[Member] = []
        # The process on this node that failed first, and how.
        self._failed: Member | None = None
        self._reason = ""

    def run(self) -> int:
        """Start the processes, wait for all of them, and end the others when one fails.

        When this returns or raises, every process that it started has ended, with its process
        group, and the output is closed. Returns 0, the exit code of the first process that failed,
        or 128 plus the number of a signal.
        """
        output = self._output
        watches = (self._limits.stall_timeout_s, self._limits.start_timeout_s) != (None, None)
        allow_files(len(self._commands))
        guard = Guard()
        with (
            tempfile.TemporaryDirectory(prefix="jaxpipe-heartbeat-")
            if watches
            else contextlib.nullcontext()
        ) as heartbeat_dir:
            try:
                for command in self._commands:
                    self._members.append(Member(command, output, guard, heartbeat_dir))
                output.start()
                exit_code = self._watch()
            finally:
                output.release()
                for member in self._members:
                    member.let_go()
                for member in self._members:
                    member.end()
                output.close()
                guard.dismiss()
        if self._failed is not None and (lines := self._failed.tail.last_error()):
            output.say("\n    ".join([f"{self._reason} The end of its standard error:", *lines]))
        return exit_code

    def _watch(self) -> int:
        limits = self._limits
        stalls = StallWatch(self._members, limits.stall_timeout_s, limits.start_timeout_s)
        judged_at: float | None = None
        while True:
            codes = [member.exit_code() for member in self._members]
            stop = next(iter(self._requests.received()), None)
            late = stalls.late()
            if stop is not None:
                self._end(stop)
                return 0 if stop.is_remote else 128 + stop.number
            if any(codes):
                judged_at = judged_at or time.monotonic() + _SETTLE_S
                if time.monotonic() > judged_at:
                    return self._end_after_failure()
            elif late is not None:
                self._end(Stop(signal.SIGTERM, limits.kill_grace_s, late + self._left()))
                return STALLED
            elif None not in codes:
                return 0
            time.sleep(_POLL_S)

    def _end_after_failure(self) -> int:
        failed = [member for member in self._members if member.exit_code()]
        # What the failed processes may have waited for; a stopped process is continued to end it.
        running = [member for member in self._members if member.exit_code() is None]
        stopped = [member for member in running if member.is_stopped]
        gone = self._left() + _sentence(stopped, "is stopped by a signal")
        reason = _failure(min(failed, key=Member.failure)) + gone
        self._end(Stop(signal.SIGTERM, self._limits.kill_grace_s, reason))
        # Launchers on other nodes need time to end their processes, so the node of the cause may
        # end last. A launcher that was asked to end exits with 0, unless it had seen a failure
        # itself.
        others = [
            member
            for member in self._members
            if member.exit_code() and member.command.control is not None
        ]
        first = min(others or failed, key=Member.failure)
        if first.command.control is None:  # otherwise its own launcher has shown its error
            self._failed = first
            self._reason = _failure(first) + gone
        code = first.exit_code() or 0
        # As in a shell.
        return code if code >= 0 else 128 - code

    def _left(self) -> str:
        """A sentence about processes that ended with 0, for which the others wait in their step."""
        found = [member for member in self._members if member.exit_code() == 0]
        return _sentence(found, "ended with exit code 0 before the others")

    def _end(self, stop: Stop) -> None:
        """Ask all running processes to end, and wait until they have or their time is over."""
        limits = self._limits
        running = [member for member in self._members if member.exit_code() is None]
        grace_s = stop.grace_s
        if grace_s is None:
            grace_s = limits.kill_grace_s if stop.number == signal.SIGINT else limits.grace_s
        for member in running:
            member.stop(stop.number, grace_s)
        self._output.release()
        self._output.say(stop.reason + _ending(len(running), len(self._members), grace_s))
        is_remote = any(member.command.control is not None for member in running)
        margin_s = _NODE_MARGIN_S if is_remote else 0.0
        deadline = time.monotonic() + grace_s + margin_s
        known = 1 if self._requests.received()[:1] == (stop,) else 0
        as_asked = (None, 0, 128 + stop.number)
        while running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if any(later.is_urgent for later in self._requests.received()[known:]):
                return
            if any(member.exit_code() not in as_asked for member in running):
                # The current step cannot finish without the failed process, so the others need less
                # time to end.
                deadline = min(deadline, time.monotonic() + limits.kill_grace_s + margin_s)
            running = [member for member in running if member.exit_code() is None]


def _sentence(found: Sequence[Member], what: str) -> str:
    return f" {found[0]} {what}{f', as {len(found) - 1} more' * (len(found) > 1)}." if found else ""


def _failure(member: Member) -> str:
    code = member.exit_code() or 0
    if code >= 0:
        return f"{member} ended with exit code {code}."
    try:
        return f"{member} was killed by {signal.Signals(-code).name}."
    except ValueError:  # a real-time signal
        return f"{member} was killed by signal {-code}."


def _ending(num_running: int, num_members: int, grace_s: float) -> str:
    if not num_running:
        return ""
    what = (
        "it"
        if num_members == 1
        else "all"
        if num_running == num_members
        else f"the other {num_running}"
        if num_running > 1
        else "the other"
    )
    return f" Ending {what}, in {grace_s:g} s at most."
