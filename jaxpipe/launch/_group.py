"""Running a group of processes to its end: all finish, or all are ended."""

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ._members import Command, Guard, Member, allow_files
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


@dataclass(frozen=True)
class Outcome:
    """The result of a group."""

    # 0, the exit code of the first process that failed, or 128 plus the number of a signal.
    exit_code: int
    # A sentence that explains why it is not 0.
    reason: str = ""
    # False after a request to end.
    may_restart: bool = True
    # The process on this node that failed first.
    failed: Member | None = None


def run_group(
    commands: Sequence[Command], limits: Limits, requests: StopRequests, output: Output
) -> Outcome:
    """Start processes, wait for all of them, and end the others when one fails; close `output`.

    When this returns or raises, every process that it started has ended, with its process group.
    """
    members: list[Member] = []
    allow_files(len(commands))
    guard = Guard()
    try:
        for command in commands:
            members.append(Member(command, output, guard))
        output.start()
        outcome = _watch(members, limits, requests, output)
    finally:
        output.release()
        for member in members:
            member.let_go()
        for member in members:
            member.end()
        output.close()
        guard.dismiss()
    if outcome.failed is not None and (lines := outcome.failed.tail.last_error()):
        output.say("\n    ".join([f"{outcome.reason} The end of its standard error:", *lines]))
    return outcome


def _watch(
    members: Sequence[Member], limits: Limits, requests: StopRequests, output: Output
) -> Outcome:
    stalls = StallWatch(members, limits.stall_timeout_s, limits.start_timeout_s)
    judged_at: float | None = None
    while True:
        codes = [member.exit_code() for member in members]
        stop = next(iter(requests.received()), None)
        late = stalls.late()
        if stop is not None:
            _end(members, stop, limits, requests, output)
            return Outcome(
                0 if stop.is_remote else 128 + stop.number, stop.reason, may_restart=False
            )
        if any(codes):
            judged_at = judged_at or time.monotonic() + _SETTLE_S
            if time.monotonic() > judged_at:
                return _end_after_failure(members, limits, requests, output)
        elif late is not None:
            late += _left(members)
            _end(members, Stop(signal.SIGTERM, limits.kill_grace_s, late), limits, requests, output)
            return Outcome(STALLED, late)
        elif None not in codes:
            return Outcome(0)
        time.sleep(_POLL_S)


def _end_after_failure(
    members: Sequence[Member], limits: Limits, requests: StopRequests, output: Output
) -> Outcome:
    failed = [member for member in members if member.exit_code()]
    # What the failed processes may have waited for; a stopped process is continued to end it.
    gone = _left(members) + _stopped(members)
    reason = _failure(min(failed, key=Member.failure)) + gone
    _end(members, Stop(signal.SIGTERM, limits.kill_grace_s, reason), limits, requests, output)
    # Launchers on other nodes need time to end their processes, so the node of the cause may end
    # last. A launcher that was asked to end exits with 0, unless it had seen a failure itself.
    others = [
        member for member in members if member.exit_code() and member.command.reach != "process"
    ]
    first = min(others or failed, key=Member.failure)
    is_here = first.command.reach == "process"  # otherwise its own launcher has shown its error
    return Outcome(
        _exit_status(first.exit_code() or 0),
        _failure(first) + gone,
        failed=first if is_here else None,
    )


def _left(members: Sequence[Member]) -> str:
    """A sentence about processes that ended with 0, for which the others wait in their step."""
    found = [member for member in members if member.exit_code() == 0]
    return _sentence(found, "ended with exit code 0 before the others")


def _stopped(members: Sequence[Member]) -> str:
    found = [member for member in members if member.exit_code() is None and member.is_stopped]
    return _sentence(found, "is stopped by a signal")


def _sentence(found: Sequence[Member], what: str) -> str:
    return f" {found[0]} {what}{f', as {len(found) - 1} more' * (len(found) > 1)}." if found else ""


def _failure(member: Member) -> str:
    return f"{member} {_how(member.exit_code() or 0)}."


def _end(
    members: Sequence[Member], stop: Stop, limits: Limits, requests: StopRequests, output: Output
) -> None:
    """Ask all running processes to end, and wait until they have or their time is over."""
    running = [member for member in members if member.exit_code() is None]
    grace_s = stop.grace_s
    if grace_s is None:
        grace_s = limits.kill_grace_s if stop.number == signal.SIGINT else limits.grace_s
    for member in running:
        member.stop(stop.number, grace_s)
    output.release()
    output.say(stop.reason + _ending(len(running), len(members), grace_s))
    margin_s = (
        _NODE_MARGIN_S if any(member.command.reach != "process" for member in running) else 0.0
    )
    deadline = time.monotonic() + grace_s + margin_s
    known = 1 if requests.received()[:1] == (stop,) else 0
    shortened = False
    while running and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if any(later.is_urgent for later in requests.received()[known:]):
            return
        as_asked = (None, 0, 128 + stop.number)
        if not shortened and any(member.exit_code() not in as_asked for member in running):
            # The current step cannot finish without the failed process, so the others need less
            # time to end.
            shortened = True
            deadline = min(deadline, time.monotonic() + limits.kill_grace_s + margin_s)
        running = [member for member in running if member.exit_code() is None]


def _exit_status(code: int) -> int:
    """A shell's exit code for a process: 128 plus the number of the signal that ended it."""
    return code if code >= 0 else 128 - code


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def _ending(num_running: int, num_members: int, grace_s: float) -> str:
    if not num_running:
        return ""
    what = (
        "all"
        if num_running == num_members > 1
        else f"the other {num_running}"
        if num_running > 1
        else "the other"
    )
    return f" Ending {'it' if num_members == 1 else what}, in {grace_s:g} s at most."
