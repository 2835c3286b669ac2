"""One running process of a group, and a guard for all of them."""

import contextlib
import math
import os
import resource
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
_PIECE_BYTES = 65536
# Of one process: its three pipes and its log. The others are those of the launcher itself.
_FILES_EACH = 4
_FILES_ELSE = 256


@dataclass(frozen=True)
class Command:
    """A program to start, and its name in messages, for example `process 3` or `node worker-1`.

    Attributes:
        environment: The whole environment.
        label: The prefix in brackets of each line, unless it is empty.
        heartbeat: A file, modified whenever the program has finished a step.
        reach: `"process"` for a process of the job on this node. For launchers on other nodes,
            `"messaged"` if they receive messages through the command's standard input, starting
            with the bytes `first_input`, or `"signalled"` if the command forwards SIGUSR1 to them.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    label: str = ""
    heartbeat: Path | None = None
    reach: str = "process"
    first_input: bytes = b""


def allow_files(num_members: int) -> None:
    """Raise the soft limit on open files, often 1024, to what so many processes need."""
    wanted = _FILES_EACH * num_members + _FILES_ELSE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Member:
    """A started process, in its own session and process group."""

    # The gate executes the program once the guard knows its number. If the launcher is killed
    # before that, the gate exits, so the program can never be left running.
    # Python and not a shell, because shells drop variables with names that they do not accept.
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
        self._unsent = b""
        environment = dict(command.environment)
        words = command.words
        if shutil.which(words[0], path=environment.get("PATH", os.defpath)) is None:
            raise LaunchError(
                f"{command.name} must run a program that is there, but got {words[0]!r}, which is "
                "none. Install it, or correct its name."
            )
        try:
            # Not reaped until `end`, so that its number, which is also the number of its group, is
            # not reused.
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
                "arguments, end other processes, or raise a limit that ulimit -a shows."
            ) from error
        guard.add(self.pid)
        stdin = self._process.stdin
        stdout = self._process.stdout
        stderr = self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None  # noqa: PT018
        self.tail = output.add(
            stdout, stderr, command.label, f"{command.name.replace(' ', '-')}.log"
        )
        # A node that does not read, or not yet, must not block this process.
        os.set_blocking(stdin.fileno(), False)
        self._send(b"\n" + command.first_input)
        if command.reach != "messaged":
            stdin.close()

    @property
    def pid(self) -> int:
        """The number of the process and of its group."""
        return self._process.pid

    def __str__(self) -> str:
        return f"{self.command.name} (pid {self.pid})"

    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it. None while it runs."""
        if self._unsent:
            self._send(b"")
        if self._exit_code is None:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                self._ended_at = time.monotonic()
                self._exit_code = (
                    state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                )
        return self._exit_code

    @property
    def is_stopped(self) -> bool:
        """True if the system reports the process as stopped. Always False except on Linux."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def failure(self) -> tuple[int, float]:
        """A sort key for processes that failed together: the first is probably the cause.

        How likely it is that another process was the cause, then when this one failed.
        """
        trouble_at = self.tail.trouble_at
        # It has recovered from an older error.
        if trouble_at is None or trouble_at < self._ended_at - _RECENT_S:
            trouble_at = math.inf
        # If a process loses another one, either JAX ends the process, or a collective raises an
        # error, later than the traceback of the lost process. A process that ended in any other way
        # failed by itself.
        if self.tail.was_ended_by_jax:
            return 2, trouble_at
        has_raised = (self.exit_code() or 0) > 0 and trouble_at < math.inf
        return (1, trouble_at) if has_raised else (0, self._ended_at)

    def stop(self, number: int, grace_s: float) -> None:
        """Ask the process's group to end; launchers on other nodes give theirs `grace_s`."""
        if self.command.reach == "messaged":
            self._send(f"stop {number} {grace_s}\n".encode())
            return
        if self.command.reach == "signalled":
            self._signal(signal.SIGUSR1)
            return
        self._signal(number)
        # A stopped process must continue to be able to end.
        self._signal(signal.SIGCONT)

    def let_go(self) -> None:
        """Close the standard input of launchers on other nodes: they then end their processes."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """End the whole process group, and reap the process."""
        # These launchers end by themselves after `let_go`.
        if self.command.reach == "messaged":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
                return
        self._signal(signal.SIGKILL)
        # A process that waits for a dead disk cannot be ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def _send(self, data: bytes) -> None:
        """Send what fits into the pipe. `exit_code` sends the rest, a piece at each call."""
        assert self._process.stdin is not None
        self._unsent += data
        try:
            while self._unsent:
                number = os.write(self._process.stdin.fileno(), self._unsent[:_PIECE_BYTES])
                self._unsent = self._unsent[number:]
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # it has ended, or was let go
            self._unsent = b""

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class Guard:
    """Ends the process groups if this process is killed. It is started before any of them.

    A small shell reads the numbers of the groups from a pipe that only this process holds open. If
    the pipe closes without the word `done`, the shell sends SIGTERM to the groups, and SIGKILL five
    seconds later.
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
        """Guard another group, by its number."""
        self._send(f"{group}\n")

    def dismiss(self) -> None:
        """End the guard, after all groups have ended."""
        self._send("done\n")
        self._process.communicate()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed
            self._process.stdin.write(line.encode())
