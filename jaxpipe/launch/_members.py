"""One running process of a group, and a guard for all of them."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import LaunchError

from ._output import Output

_REAP_S = 5.0
_RECENT_S = 60.0


@dataclass(frozen=True)
class Command:
    """A program to start, and its name in messages.

    `name` is for example `process 3` or `node worker-1`; `label` is in brackets before each line,
    unless it is empty. `environment` is the whole environment. The time of change of `heartbeat`
    says when the program last finished a step.

    `reach` is `"process"` for a process of the job, here. It is `"messaged"` for launchers on other
    nodes that get messages through the command's standard input, first the bytes `first_input`. It
    is `"signalled"` for launchers on other nodes to which the command passes SIGUSR1 on.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    label: str = ""
    heartbeat: Path | None = None
    reach: str = "process"
    first_input: bytes = b""


class Member:
    """A process that was started, in a session and process group of its own.

    It begins as a gate, which becomes the program once the guard knows its number, and ends if the
    launcher is killed before that: there is no moment at which nobody would end the program. It is
    left unreaped until `end`, so that its number, which is its group's too, is nobody else's.
    """

    # Python and not a shell, as shells drop variables whose names are not theirs.
    _GATE = """
import os, signal, sys
if not os.read(0, 1):
    sys.exit()
if sys.argv[1] != "messaged":
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\\n")
    sys.exit(127)
"""

    def __init__(self, command: Command, output: Output, guard: "Guard") -> None:
        self.command = command
        self._exit_code: int | None = None
        self._ended_at = 0.0
        environment, words = dict(command.environment), command.words
        if shutil.which(words[0], path=environment.get("PATH", os.defpath)) is None:
            raise LaunchError(
                f"{command.name} must run a program that is there, but got {words[0]!r}, which is "
                "none. Install it, or correct its name."
            )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", self._GATE, command.reach, *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"{command.name} must be started, but got {words[0]!r}: {error}. Shorten its "
                "arguments, or end other processes."
            ) from error
        guard.add(self.pid)
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: PT018
        self.tail = output.add(
            stdout, stderr, command.label, f"{command.name.replace(' ', '-')}.log"
        )
        self._send(b"\n" + command.first_input)
        if command.reach != "messaged":
            stdin.close()

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    def __str__(self) -> str:
        return f"{self.command.name} (pid {self.pid})"

    def exit_code(self) -> int | None:
        """Exit code, or minus the number of the signal that ended it; None while it runs."""
        if self._exit_code is None:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                self._ended_at = time.monotonic()
                self._exit_code = (
                    state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                )
        return self._exit_code

    def failure(self) -> tuple[int, float]:
        """Puts processes that failed together into their order: the first is likely the cause.

        A process that loses another raises an error from a collective, after that one's own
        traceback, or JAX ends it. So one that ended in another way did so by itself. The key is how
        likely others are the cause, then when it failed.
        """
        trouble_at = self.tail.trouble_at
        # It recovered from an error longer ago.
        if trouble_at is None or trouble_at < self._ended_at - _RECENT_S:
            trouble_at = math.inf
        if self.tail.was_ended_by_jax:
            return 2, trouble_at
        has_raised = (self.exit_code() or 0) > 0 and trouble_at < math.inf
        return (1, trouble_at) if has_raised else (0, self._ended_at)

    def stop(self, number: int, grace_s: float) -> None:
        """Ask it to end; a stopped process is continued so that it can.

        Its group gets the signal `number`. Launchers on other nodes give it to the processes there,
        which may take `grace_s`.
        """
        if self.command.reach == "messaged":
            self._send(f"stop {number} {grace_s}\n".encode())
            return
        if self.command.reach == "signalled":
            self._signal(signal.SIGUSR1)
            return
        self._signal(number)
        self._signal(signal.SIGCONT)

    def let_go(self) -> None:
        """Close what launchers on other nodes listen to, so that they end what they started.

        `end` waits for that.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """End its whole group, and reap it."""
        if self.command.reach == "messaged":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
                return
        self._signal(signal.SIGKILL)
        # One that waits for a dead disk cannot be ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while data:
                data = data[self._process.stdin.write(data) or 0 :]

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class Guard:
    """Ends the groups should this process be killed before it can; started before any of them.

    A small shell waits at a pipe that this process alone holds open, and through which it gets the
    groups' numbers. Where the pipe closes without the word `done`, the groups get SIGTERM, and
    SIGKILL five seconds later.
    """

    _SCRIPT = """
groups=
while read -r word; do
    [ "$word" = done ] && exit
    groups="$groups -$word"
done
[ -n "$groups" ] || exit
kill -s TERM -- $groups
sleep 5
kill -s KILL -- $groups
"""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"/bin/sh must be started, but got {error}. End other processes."
            ) from error

    def add(self, group: int) -> None:
        """Guard one more group, by its number."""
        self._send(f"{group}\n")

    def dismiss(self) -> None:
        """The groups have ended."""
        self._send("done\n")
        self._process.communicate()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed it
            self._process.stdin.write(line.encode())
