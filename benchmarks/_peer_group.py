"""A peer as processes that wait for orders: started, asked for steps, and ended as one."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from benchmarks._peer_member import MARK, Case


class PeerError(Exception):
    """A peer's process ended or said nothing for too long.

    The message is the end of what it wrote.
    """


class PeerGroup:
    """The processes of one peer, one per case.

    Args:
        command: What each runs, without the case.
        cases: The case of each process, in the order of their ranks.
        env: Further environment variables.
        limit_s: How long one answer may take.
    """

    def __init__(
        self, command: Sequence[str], cases: Sequence[Case], env: dict[str, str], limit_s: float
    ) -> None:
        self._limit_s = limit_s
        self._errors: list[IO[str]] = []
        self._members: list[subprocess.Popen[str]] = []
        port = str(_free_port())
        for rank, case in enumerate(cases):
            self._errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # closed in `close`
            self._members.append(
                subprocess.Popen(
                    [*command, case.as_argument()],
                    env={**os.environ, **_names_of_rank(rank, len(cases), port), **env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    text=True,
                    start_new_session=True,
                )
            )

    def read(self) -> dict[str, list[float]]:
        """Wait for the members' answers.

        Returns:
            `seconds`, per step those of the slowest member, `cpu`, those of all members' threads,
            and `losses`.

        Raises:
            PeerError: A member ended or took too long.
        """
        done = threading.Event()
        threading.Thread(target=self._watch, args=(done,), daemon=True).start()
        try:
            answers = [self._answer(rank) for rank in range(len(self._members))]
        finally:
            done.set()
        known = next(
            (a["losses"] for a in answers if not math.isnan(a["losses"][0])), answers[0]["losses"]
        )
        seconds, cpu = (
            list(zip(*(a[name] for a in answers), strict=True)) for name in ("seconds", "cpu")
        )
        return {"seconds": list(map(max, seconds)), "cpu": list(map(sum, cpu)), "losses": known}

    def run(self, num_steps: int) -> dict[str, list[float]]:
        """Let all members run some steps, and wait."""
        for member in self._members:
            with contextlib.suppress(BrokenPipeError):
                _pipe(member.stdin).write(f"{num_steps}\n")
                _pipe(member.stdin).flush()
        return self.read()

    def close(self) -> None:
        """End the members."""
        self._kill()
        for member, errors in zip(self._members, self._errors, strict=True):
            member.wait()
            with contextlib.suppress(BrokenPipeError):
                _pipe(member.stdin).close()
            _pipe(member.stdout).close()
            errors.close()

    def _answer(self, rank: int) -> dict[str, list[float]]:
        for line in _pipe(self._members[rank].stdout):
            if MARK in line:
                return json.loads(line.partition(MARK)[2])
        raise PeerError(self._reason())

    def _watch(self, done: threading.Event) -> None:
        """End all members when one has ended or the time is over, so that nobody waits for it."""
        late = time.monotonic() + self._limit_s
        while not done.wait(0.5):
            if time.monotonic() > late or any(
                member.poll() is not None for member in self._members
            ):
                self._kill()
                return

    def _reason(self) -> str:
        for member, errors in zip(self._members, self._errors, strict=True):
            if member.wait() != -signal.SIGKILL:
                errors.seek(0)
                lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
                named = [line for line in lines if line.split(":")[0].endswith("Error")]
                return (named or lines or [f"exit status {member.returncode}"])[-1]
        return f"no answer within {self._limit_s:.0f} s"

    def _kill(self) -> None:
        for member in self._members:
            if member.poll() is None:
                os.killpg(member.pid, signal.SIGKILL)


KEPT_MEMORY = {"ARENA_MAX": 1, "MMAP_MAX_": 0, "TRIM_THRESHOLD_": 2**40, "TOP_PAD_": 2**26}
"""Settings of glibc with which freed memory stays with the process.

Accelerators' allocators keep it so; else every step faults in its pages again.
"""


def _names_of_rank(rank: int, num_ranks: int, port: str) -> dict[str, str]:
    """What torch, DeepSpeed, jaxpipe and the C library read.

    Each process of torch has one processor thread.
    """
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": num_ranks}
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }
    memory = {f"MALLOC_{name}": value for name, value in KEPT_MEMORY.items()}
    return {**{name: str(value) for name, value in {**names, **memory}.items()}, **told}


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
