"""The lock on a directory of checkpoints.

Only one job at a time saves to a directory, from its first save there until the job ends.

    save_dir/.lock/<since>-<pid>-<start>-<place>-<nonce>-<host>

The folder is created by a rename, with its one file already in it. Only one of several processes
can succeed in that rename, on network file systems too. The file is empty, so it is never half
written and fits on a full disk: its name identifies the owner, and its modification time is the
owner's last heartbeat. The file of a dead owner is removed by its name. Names are unique, so
processes that take over at the same time cannot remove each other's files.

Object stores have no rename, and not every store supports conditional writes. On a store, each
process writes its own object and then lists the folder. The process that finds only its own object
holds the lock. Of two processes, the later one to write finds the other's object if lists show all
earlier writes, as they do on S3, Google Cloud Storage and Azure. So two processes never both hold
the lock.
"""

import atexit
import contextlib
import datetime
import errno
import hashlib
import os
import queue
import re
import secrets
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpipe._stores import AnyPath, StorePath
from jaxpipe.errors import CheckpointError

from ._storage import changed, identity, is_same, touch

LOCK = ".lock"

_BEAT_S = 5.0
_SILENT_S = 60.0
"""Seconds between heartbeats, and seconds without one after which a remote owner counts as dead."""
_POLL_S = 0.25
_YIELD_S = 2.0
"""Seconds for which one of two contenders on a store waits for the other to withdraw."""
_TAKEN_TEXT = "taken"
"""Content of the owner's object on a store; the object of a contender is empty."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_NAME = re.compile(
    r"([0-9]{1,11})-([0-9]{1,10})-([0-9]*)-([0-9a-f]{8})-([0-9a-f]{8})-(.+)", re.DOTALL
)
_TEMPORARY = re.compile(r"\.lock-[0-9a-f]{8}")


@dataclass(frozen=True)
class _Owner:
    """The process that holds a lock.

    Attributes:
        since: When the lock was taken, in seconds since the epoch.
        start: When the process started, in clock ticks of its machine; empty if the system does not
            report it.
        place: Hash of everything that process numbers depend on (the machine, its last boot and
            the container) and of the directory. The directory is included so that the owner of the
            original does not appear to hold a copy of the directory.
        nonce: Random text that makes the file name unique.
    """

    since: str
    pid: str
    start: str
    place: str
    nonce: str
    host: str

    @property
    def name(self) -> str:
        """The name of the lock file."""
        return "-".join((self.since, self.pid, self.start, self.place, self.nonce, self.host))


class DirectoryLock:
    """A lock that this process holds; in a job of several processes, one holds it for all.

    Raises CheckpointError if another process holds the lock; the error says which, and since when.
    The lock of a dead process is taken over. If that process ran on another machine, it counts as
    dead after a minute without a heartbeat. Raises OSError if the directory cannot be written.

    Attributes:
        known: The commits of the directory, by tag, as far as saves of this process have read or
            written them. They cannot change as long as the lock excludes other jobs.
    """

    def __init__(self, save_dir: AnyPath) -> None:
        self.known: dict[str, Any] = {}
        self._owner = _new_owner(save_dir)
        self._file = save_dir / LOCK / self._owner.name
        self._runs: set[int] = set()
        self._is_saving = True
        self._is_held = True
        self._is_dropped = False
        # The garbage collector may call `_forget` in this lock's thread too, amid a wait. A
        # `SimpleQueue` allows that; an `Event` would deadlock.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        _HELD[self._owner.name] = self  # before other threads of this process can see the file
        try:
            _take(save_dir, self._owner)
        except BaseException:
            del _HELD[self._owner.name]
            raise
        threading.Thread(target=self._beat, daemon=True, name="checkpoint lock").start()
        if isinstance(save_dir, StorePath):
            atexit.register(self._end)

    @classmethod
    def begin_save(cls, save_dir: AnyPath) -> "DirectoryLock":
        """Lock a directory for a save, or use the lock that a run of this process holds there."""
        for file in _files(save_dir / LOCK):
            held = _HELD.get(file.name)
            if held is not None and held.is_at(file):
                with _GUARD:
                    if not held._is_saving:
                        held._is_saving = True
                        return held
        # Refuses a directory that this process is saving to already: its own file is there.
        return cls(save_dir)

    def end_save(self, run: object, *, is_kept: bool) -> None:
        """End a save, so that another save of this process can begin.

        With `is_kept`, the lock is held for `run` until `run` is deleted or the program ends.
        Otherwise the lock is released, unless it is already held for another run.
        """
        if not is_kept:
            self.known.clear()  # what a failed save has written is not known
        if is_kept and id(run) not in self._runs:
            self._runs.add(id(run))
            weakref.finalize(run, self._forget, id(run))
        self._is_saving = False
        if not self._runs:
            self.release()

    def check(self) -> None:
        """Raise OSError unless this process still holds the lock."""
        with contextlib.suppress(FileNotFoundError):
            touch(self._file)
            if not isinstance(self._file, StorePath) or _is_alone(self._file):
                return
        # This process missed its heartbeats for too long, or somebody removed the file.
        others = [file for file in _files(self._file.parent) if file != self._file]
        names = " and ".join(_describe(_owner_of(file)) for file in others) or "nobody"
        if isinstance(self._file, StorePath):
            self.release()  # while two processes have the lock, neither may commit
        raise OSError(f"this job lost its lock on the directory, which is now held by {names}")

    def release(self) -> None:
        """Release the lock; does nothing if the lock is lost."""
        if self._owner.pid != str(os.getpid()):  # a fork of the process that holds it
            return
        self._let_go()
        self._remove_file()

    def is_at(self, file: AnyPath) -> bool:
        """Whether `file` is this lock's own file, not a copy, and this process is not a fork."""
        return self._owner.pid == str(os.getpid()) and is_same(self._file, file)

    def _forget(self, run: int) -> None:
        self._runs.discard(run)
        if self._runs or self._is_saving:
            return
        if isinstance(self._file, StorePath) and self._owner.pid == str(os.getpid()):
            # The garbage collector calls this amid any other work, which a store that does not
            # answer must not hold up: the thread of the heartbeats removes the object.
            self._is_dropped = True
            self._let_go()
        else:
            self.release()

    def _end(self) -> None:
        """Release the lock when the program ends, which stops the thread at any line."""
        if not self._is_saving:
            self.release()

    def _let_go(self) -> None:
        # Forget the lock first: a file that an outage keeps from being removed then has no owner.
        _HELD.pop(self._owner.name, None)
        self._is_held = False
        self._wakes.put(None)

    def _remove_file(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink()
        with contextlib.suppress(OSError):  # another job has taken it since
            self._file.parent.rmdir()

    def _beat(self) -> None:
        while self._is_held:
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=_BEAT_S)
            if not self._is_held:
                break
            try:
                touch(self._file)
                if not self._is_held:  # so `touch` may have written it again
                    self._file.unlink(missing_ok=True)
            except FileNotFoundError:  # the lock is lost
                self._wakes.get()
            except OSError:  # an outage, which may end
                continue
        if self._is_dropped:
            self._remove_file()
        atexit.unregister(self._end)


_GUARD = threading.Lock()
_HELD: dict[str, DirectoryLock] = {}
"""The locks that this process holds, by file name.

A lock belongs to the process and covers all of its engines.
"""


def _take(save_dir: AnyPath, owner: _Owner) -> None:
    if isinstance(save_dir, StorePath):
        _take_on_store(save_dir, owner)
        return
    folder = save_dir / LOCK
    mine = save_dir / f"{LOCK}-{owner.nonce}"
    mine.mkdir()
    try:
        (mine / owner.name).touch()
        while not _renamed(mine, folder, owner):
            for file in _files(folder):
                _wait_until_gone(save_dir, file, owner, mine / owner.name)
                file.unlink(missing_ok=True)
            # Some systems do not let a rename replace an empty folder.
            with contextlib.suppress(OSError):
                folder.rmdir()
    finally:
        _remove(mine)  # only left if the rename did not succeed
    # Remove leftovers of killed processes. The lock is taken even if that fails.
    with contextlib.suppress(OSError):
        for left in [
            path
            for path in save_dir.iterdir()
            if _TEMPORARY.fullmatch(path.name) and not path.is_symlink()
        ]:
            if all(_is_gone(file, owner, folder / owner.name) for file in _files(left) or [left]):
                _remove(left)


def _take_on_store(save_dir: StorePath, owner: _Owner) -> None:
    mine = save_dir / LOCK / owner.name
    mine.write_bytes(b"")
    try:
        withdraws_by = time.monotonic() + _YIELD_S
        while others := [file for file in _files(mine.parent) if file != mine]:
            for file in others:
                # If two processes start at the same time, the one with the later name withdraws as
                # soon as it sees a heartbeat of the other, unless it already holds the lock.
                touch(mine)
                if file.name < owner.name or time.monotonic() > withdraws_by:
                    _wait_until_gone(save_dir, file, owner, mine)
                    file.unlink(missing_ok=True)
            time.sleep(_POLL_S)
        mine.write_text(_TAKEN_TEXT)
    except BaseException:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
        raise


def _is_alone(mine: StorePath) -> bool:
    """Return False if another job took this one for dead and holds the lock too."""
    # A heartbeat may recreate the object after the other job removed it.
    gives_up_by = time.monotonic() + _YIELD_S
    while others := [file for file in _files(mine.parent) if file != mine]:
        for file in others:
            with contextlib.suppress(FileNotFoundError):
                if isinstance(file, StorePath) and file.read_text() == _TAKEN_TEXT:
                    return False
        # The others are contenders, which withdraw when they see this object change, or were
        # killed.
        if time.monotonic() > gives_up_by:
            return True
        time.sleep(_POLL_S)
        touch(mine)
    return True


def _renamed(mine: Path, folder: Path, owner: _Owner) -> bool:
    try:
        mine.rename(folder)
    except OSError as error:
        # A network file system may send a rename twice and report the result of the second try.
        if (folder / owner.name).exists():
            return True
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _remove(folder: Path) -> None:
    """Remove a folder that this module made, unless it has other files in it."""
    with contextlib.suppress(OSError):
        for file in [file for file in _files(folder) if _owner_of(file).pid]:
            file.unlink()
        folder.rmdir()


def _files(folder: AnyPath) -> list[AnyPath]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _owner_of(file: AnyPath) -> _Owner:
    """Parse the owner from a file's name; for any other name, only the host is filled in."""
    found = _NAME.fullmatch(file.name)
    return _Owner(*found.groups()) if found else _Owner("", "", "", "", "", file.name)


def _wait_until_gone(save_dir: AnyPath, file: AnyPath, own: _Owner, clock: AnyPath) -> None:
    """Block until an owner is known to be dead; raise as soon as it is known to be alive."""
    first = changed(file)
    other = _owner_of(file)
    while not _is_gone(file, own, clock):
        if _is_alive(other, own) or changed(file) not in (first, None):
            raise _held(save_dir, other, own)
        time.sleep(_POLL_S)


def _is_gone(file: AnyPath, own: _Owner, clock: AnyPath) -> bool:
    """Whether an owner has died, or has missed heartbeats by the clock of the file system."""
    touch(clock)
    found = changed(file)
    now = changed(clock)
    other = _owner_of(file)
    if found is None or now is None or _is_dead(other, own) or _is_copy(file):
        return True
    return not _is_alive(other, own) and now - found > _SILENT_S


def _is_copy(file: AnyPath) -> bool:
    """Whether a file is a copy of this process's lock, made by copying its directory."""
    held = _HELD.get(file.name)
    return held is not None and not held.is_at(file)


def _is_dead(other: _Owner, own: _Owner) -> bool:
    """Whether a process of this place has ended, or this process has released the lock."""
    if other.place != own.place:
        return False
    if other.pid == own.pid:
        return other.start != own.start or other.name not in _HELD
    try:
        # Signal 0 is not delivered: the call only checks that the process exists.
        os.kill(int(other.pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    # Process numbers are reused.
    return _start_of(other.pid) not in ("", other.start)


def _is_alive(other: _Owner, own: _Owner) -> bool:
    return other.place == own.place and bool(other.start) and _start_of(other.pid) == other.start


def _start_of(pid: str) -> str:
    """When a process of this place started; empty if not reported, `ended` if it has ended."""
    try:
        # The second field is the program's name, which may contain spaces and brackets, so parse
        # what follows the last bracket.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]


def _new_owner(save_dir: AnyPath) -> _Owner:
    host = socket.gethostname()
    pid = str(os.getpid())
    facts = [host, identity(save_dir)]
    with contextlib.suppress(OSError):
        facts += [
            Path("/proc/sys/kernel/random/boot_id").read_text(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    place = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    return _Owner(
        str(int(time.time())),
        pid,
        _start_of(pid),
        place,
        secrets.token_hex(4),
        host.replace("/", "_"),
    )


def _describe(other: _Owner) -> str:
    if not other.pid:
        return repr(other.host)
    since = datetime.datetime.fromtimestamp(int(other.since), datetime.UTC)
    return f"process {other.pid} on {other.host} since {since:%Y-%m-%d %H:%M:%S} UTC"


def _held(save_dir: AnyPath, other: _Owner, own: _Owner) -> CheckpointError:
    itself = ", which is this process" if (other.place, other.pid) == (own.place, own.pid) else ""
    return CheckpointError(
        f"save_dir must be written by one job at a time, but got save_dir={str(save_dir)!r}, which "
        f"is held by {_describe(other)}{itself}. Save again when that process has ended, or give "
        "each job its own directory."
    )
