"""The process that holds the lock on a directory of checkpoints."""

import contextlib
import datetime
import hashlib
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(
    r"([0-9]{1,11})-([0-9]{1,10})-([0-9]*)-([0-9a-f]{8})-([0-9a-f]{8})-(.+)", re.DOTALL
)


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        since: When the lock was taken, in seconds since the epoch.
        start: When the process started, in clock ticks of its machine; empty if the system does not
            report it.
        place: Hash of everything that process numbers depend on (the machine, its last boot and
            the container) and of the directory. The directory is included so that the owner of the
            original does not appear to hold a copy of the directory.
        nonce: Random text that makes the name unique.
    """

    since: str
    pid: str
    start: str
    place: str
    nonce: str
    host: str

    @classmethod
    def here(cls, directory: str) -> "Owner":
        """This process; `directory` identifies the directory and differs for a copy of it."""
        host = socket.gethostname()
        pid = str(os.getpid())
        facts = [host, directory]
        with contextlib.suppress(OSError):
            facts += [
                Path("/proc/sys/kernel/random/boot_id").read_text(),
                str(Path("/proc/self/ns/pid").readlink()),
            ]
        return cls(
            since=str(int(time.time())),
            pid=pid,
            start=start_of(pid),
            place=hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8],
            nonce=secrets.token_hex(4),
            host=host.replace("/", "_"),
        )

    @classmethod
    def of(cls, name: str) -> "Owner":
        """Parse an owner's name; for any other name, only the host is filled in."""
        found = _NAME.fullmatch(name)
        return cls(*found.groups()) if found else cls("", "", "", "", "", name)

    @property
    def name(self) -> str:
        """A name that identifies the owner and can be that of a file."""
        return "-".join((self.since, self.pid, self.start, self.place, self.nonce, self.host))

    @property
    def is_running(self) -> bool | None:
        """Whether an owner of this place still runs. None if the system does not report it."""
        start = start_of(self.pid)
        if start and self.start:
            return start == self.start  # process numbers are reused
        try:
            # Signal 0 is not delivered: the call only checks that the process exists.
            os.kill(int(self.pid), 0)
        except ProcessLookupError:
            return False
        except (OSError, ValueError, OverflowError):
            pass
        return None

    def __str__(self) -> str:
        if not self.pid:
            return repr(self.host)
        since = datetime.datetime.fromtimestamp(int(self.since), datetime.UTC)
        return f"process {self.pid} on {self.host} since {since:%Y-%m-%d %H:%M:%S} UTC"


def start_of(pid: str) -> str:
    """When a process of this place started; empty if not reported, `ended` if it has ended."""
    try:
        # The second field is the program's name, which may contain spaces and brackets, so parse
        # what follows the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]
