"""One running process of a group, and a guard for all of them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import LaunchError

from ._output import Output

_REAP_S = 5.0


@dataclass(frozen=True)
class Command:
    """What to start, and how it is spoken of.

    Args:
        name: Such as `process 3` or `node worker-1`.
        words: Program and arguments.
        environment: All of its environment.
        label: What stands in brackets before its lines; "" for nothing.
        heartbeat: The file whose time of change says when it last finished a step; None: it does not say.
        reach: `"process"`: a process of the job, here. `"told"`: launchers on other nodes, which are told what to do
            through the command's standard input. `"signalled"`: launchers on other nodes, which the command passes
            SIGUSR1 on to.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    label: str = ""
    heartbeat: Path | None = None
    reach: str = "process"


class Member:
    """A process that was started, in a session and process group of its own.

    It is left unreaped until `end`, so that its number, which is its group's too, is nobody else's.

    Args:
        command: What to start.
        output: Takes what it writes.

    Raises:
        LaunchError: There is no such program.
    """

    def __init__(self, command: Command, output: Output) -> None:
        self.command = command
        self._exit_code: int | None = None
        try:
            self._process = subprocess.Popen(
                command.words,
                env=dict(command.environment),
                stdin=subprocess.PIPE if command.reach == "told" else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"{command.name} must run a program that is there, but got {command.words[0]!r}: {error.strerror}. "
                "Install it, or correct its name."
            ) from error
        stdout, stderr = self._process.stdout, self._process.stderr
        if stdout is not None and stderr is not None:
            output.add(stdout, stderr, command.label, f"{command.name.replace(' ', '-')}.log")

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    def __str__(self) -> str:
        return f"{self.command.name} (pid {self.pid})"

    def exit_code(self) -> int | None:
        """How it ended.

        Returns:
            None while it runs; its exit code; minus the number of the signal that ended it.
        """
        if self._exit_code is None:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                self._exit_code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
        return self._exit_code

    def stop(self, number: int, grace_s: float) -> None:
        """Ask it to end; a stopped process is continued so that it can.

        Args:
            number: The signal for its group; launchers on other nodes give it to the processes there.
            grace_s: How long the processes there may take.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"stop {number} {grace_s}\n".encode())
            return
        if self.command.reach == "signalled":
            self._signal(signal.SIGUSR1)
            return
        self._signal(number)
        self._signal(signal.SIGCONT)

    def let_go(self) -> None:
        """Close what launchers on other nodes listen to, so that they end what they started; `end` waits for that."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self) -> None:
        """End its whole group, and reap it."""
        if self._process.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_S)
                return
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead disk cannot be ended
            self._process.wait(_REAP_S)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class Guard:
    """Ends the groups should this process be killed before it can.

    A small shell waits at a pipe that this process alone holds open. Where the pipe closes without a word, the groups
    get SIGTERM, and SIGKILL five seconds later.

    Args:
        members: The processes whose groups are guarded.
    """

    _SCRIPT = 'read -r word; [ "$word" = done ] || { kill -s TERM -- "$@"; sleep 5; kill -s KILL -- "$@"; }'

    def __init__(self, members: Sequence[Member]) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self._SCRIPT, "sh", *(f"-{member.pid}" for member in members)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The groups have ended."""
        with contextlib.suppress(OSError):
            self._process.communicate(b"done\n")
