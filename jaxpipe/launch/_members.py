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
from pathlib import Path

from jaxpipe.distributed import HEARTBEAT_FILE
from jaxpipe.errors import LaunchError

from ._commands import Command
from ._output import Output
from ._variables import inherited

_REAP_S = 5.0
_RECENT_S = 60.0
# Of one process: its three pipes and its log. The others are those of the launcher itself.
_FILES_EACH = 4
_FILES_ELSE = 256


def allow_files(num_members: int) -> None:
    """Raise the soft limit on open files, often 1024, to what so many processes need."""
    wanted = _FILES_EACH * num_members + _FILES_ELSE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Guard:
    """Ends the process groups if this process is killed. It is started before any of them.

    A small shell reads the numbers of the groups from a pipe. If the pipe closes without the word
    `done`, the shell sends SIGTERM to the groups, and SIGKILL five seconds later.
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
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    @property
    def descriptor(self) -> int:
        """The pipe to which each process writes the number of its group."""
        return self._pipe.fileno()

    def dismiss(self) -> None:
        """End the guard, after all groups have ended."""
        with contextlib.suppress(OSError):  # it was killed
            self._pipe.write(b"done\n")
        self._process.communicate()


class Member:
    """A started process, in its own session and process group."""

    # The gate tells the guard its number and then executes the program. It holds the guard's pipe
    # open until then, so if the launcher is killed meanwhile, the guard ends the program too.
    # Python and not a shell, because shells drop variables with names that they do not accept.
    _GATE = """
import os, signal, sys
guard = int(sys.argv[1])
os.write(guard, b"%d\\n" % os.getpid())
os.close(guard)
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[2]}: {error.strerror}\\n")
    sys.exit(127)
"""

    def __init__(
        self, command: Command, output: Output, guard: Guard, heartbeat_dir: str | None
    ) -> None:
        self.command = command
        # A file that the program modifies whenever it has finished a step.
        self.heartbeat: Path | None = None
        self._exit_code: int | None = None
        self._ended_at = 0.0
        self._unsent = command.first_input
        environment = {**inherited(), **command.variables}
        words = command.words
        if shutil.which(words[0], path=environment.get("PATH", os.defpath)) is None:
            raise LaunchError(
                f"{command.name} must run a program that is there, but got {words[0]!r}, which is "
                "none. Install it, or correct its name."
            )
        if heartbeat_dir is not None and command.control is None:
            self.heartbeat = Path(heartbeat_dir, command.label)
            self.heartbeat.touch()
            os.utime(self.heartbeat, (0, 0))  # so that even an early first step changes the time
            environment[HEARTBEAT_FILE] = str(self.heartbeat)
        try:
            # Not reaped until `end`, so that its number, which is also the number of its group, is
            # not reused.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", self._GATE, str(guard.descriptor), *words],
                env=environment,
                stdin=subprocess.PIPE if command.control == "stdin" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=[guard.descriptor],
            )
        except OSError as error:
            raise LaunchError(
                f"{command.name} must be started, but got {words[0]!r}: {error}. Shorten its "
                "arguments, end other processes, or raise a limit that ulimit -a shows."
            ) from error
        stdout = self._process.stdout
        stderr = self._process.stderr
        assert stdout is not None and stderr is not None  # noqa: PT018
        self.tail = output.add(
            stdout, stderr, command.label, f"{command.name.replace(' ', '-')}.log"
        )
        if self._process.stdin is not None:
            # A node that does not read, or not yet, must not block this process.
            os.set_blocking(self._process.stdin.fileno(), False)
            self._send()

    @property
    def pid(self) -> int:
        """The number of the process and of its group."""
        return self._process.pid

    def __str__(self) -> str:
        return f"{self.command.name} (pid {self.pid})"

    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it. None while it runs."""
        if self._unsent:
            self._send()
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
        if self.command.control == "stdin":
            self._unsent += f"stop {number} {grace_s}\n".encode()
        elif self.command.control == "signal":
            self._signal(signal.SIGUSR1)
        else:
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
        if self.command.control == "stdin":
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
                return
        self._signal(signal.SIGKILL)
        # A process that waits for a dead disk cannot be ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def _send(self) -> None:
        """Send what fits into the pipe; the next call sends more."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            sent = self._process.stdin.write(self._unsent)
            self._unsent = self._unsent[sent or 0 :]  # None if nothing fits

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
