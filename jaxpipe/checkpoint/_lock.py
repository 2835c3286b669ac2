"""The lock on a directory of checkpoints.

Only one job at a time saves to a directory, from its first save there until the job ends.

    save_dir/.lock/<since>-<pid>-<start>-<place>-<nonce>-<host>

The folder is created by a rename, with its one file already in it. Only one of several processes
can succeed in that rename, on network file systems too. The file is empty, so it is never half
written and fits on a full disk: its name identifies the owner, and its modification time is the
owner's last heartbeat. The file of a dead owner is removed by its name. Names are unique, so
processes that take over at the same time cannot remove each other's files.

An object store has no rename, but conditional writes. There the lock is one object, whose content
names the owner:

    save_dir/.lock/owner

It is created only if it does not exist, and every later write (a heartbeat, a release, the takeover
from a dead owner) names the version that it replaces. So of several writers one succeeds, and a
request that arrives late changes nothing. A release leaves the object empty: stores delete without
a condition, so a delayed deletion could remove the lock of the next owner.
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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpipe._stores import AnyPath, StorePath, read_version, replace_version
from jaxpipe.errors import CheckpointError

from ._storage import changed, identity, is_same, touch

LOCK = ".lock"

_BEAT_S = 5.0
_SILENT_S = 60.0
"""Seconds between heartbeats, and seconds without one after which a remote owner counts as dead."""
_POLL_S = 0.25
_OBJECT = "owner"
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
        on_store = isinstance(save_dir, StorePath)
        self._file = save_dir / LOCK / (_OBJECT if on_store else self._owner.name)
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
            self.release()  # it may have been taken, with the answer lost
            raise
        threading.Thread(target=self._beat, daemon=True, name="checkpoint lock").start()
        if on_store:
            atexit.register(self._end)

    @classmethod
    def begin_save(cls, save_dir: AnyPath) -> "DirectoryLock":
        """Lock a directory for a save, or use the lock that a run of this process holds there."""
        for file, owner in _owners(save_dir / LOCK):
            held = _HELD.get(owner.name)
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
            self._touch()
            return
        # This process missed its heartbeats for too long, or somebody removed the file.
        owners = [owner for _, owner in _owners(self._file.parent) if owner != self._owner]
        names = " and ".join(map(_describe, owners)) or "nobody"
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

    def _touch(self) -> None:
        """Give a sign of life; raises FileNotFoundError if the lock is lost."""
        if not isinstance(self._file, StorePath):
            touch(self._file)
        # New at each write, because the version of an object may be a hash of its content.
        elif not _replace(self._file, self._owner, f"{self._owner.name}\n{secrets.token_hex(8)}"):
            raise FileNotFoundError(errno.ENOENT, "the lock is lost", str(self._file))

    def _remove_file(self) -> None:
        with contextlib.suppress(OSError):
            if isinstance(self._file, StorePath):
                _replace(self._file, self._owner, "")
                return
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
                self._touch()
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
            for file, other in _owners(folder):
                _wait_until_gone(file, other, owner, mine / owner.name)
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
            owners = _owners(left) or [(left, _owner_of(left.name))]
            if all(_is_gone(file, other, owner, folder / owner.name) for file, other in owners):
                _remove(left)


def _take_on_store(save_dir: StorePath, owner: _Owner) -> None:
    file = save_dir / LOCK / _OBJECT
    clock = file.with_name(owner.name)
    while True:
        name, version = _read(file)
        if name == owner.name:
            return
        if name:
            try:
                _wait_until_gone(file, _owner_of(name), owner, clock)
            finally:
                with contextlib.suppress(OSError):
                    clock.unlink()
        # Whether this has succeeded is read, because the answer may be that to a second attempt.
        replace_version(file, version, owner.name)


def _replace(file: StorePath, owner: _Owner, content: str) -> bool:
    """Replace an owner's object; False if it is another's."""
    # More than once if the answer is lost, or two threads write at the same time.
    while True:
        name, version = _read(file)
        if name != owner.name:
            return False
        if replace_version(file, version, content):
            return True


def _read(file: StorePath) -> tuple[str, Mapping[str, str]]:
    """Read an owner's name, which is empty if the lock is free, and the version of the object."""
    content, version = read_version(file)
    return content.partition("\n")[0], version


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
        for file, owner in _owners(folder):
            if owner.pid:
                file.unlink()
        folder.rmdir()


def _owners(folder: AnyPath) -> list[tuple[AnyPath, _Owner]]:
    """The files of a lock, and their owners."""
    if isinstance(folder, StorePath):
        name, _ = _read(folder / _OBJECT)
        return [(folder / _OBJECT, _owner_of(name))] if name else []
    with contextlib.suppress(FileNotFoundError):
        return [(file, _owner_of(file.name)) for file in folder.iterdir()]
    return []


def _owner_of(name: str) -> _Owner:
    """Parse an owner's name; for any other name, only the host is filled in."""
    found = _NAME.fullmatch(name)
    return _Owner(*found.groups()) if found else _Owner("", "", "", "", "", name)


def _wait_until_gone(file: AnyPath, other: _Owner, own: _Owner, clock: AnyPath) -> None:
    """Block until an owner is known to be dead; raise as soon as it is known to be alive."""
    first = changed(file)
    while not _is_gone(file, other, own, clock):
        if _is_alive(other, own) or changed(file) not in (first, None):
            raise _held(file.parent.parent, other, own)
        time.sleep(_POLL_S)


def _is_gone(file: AnyPath, other: _Owner, own: _Owner, clock: AnyPath) -> bool:
    """Whether an owner has died, or has missed heartbeats by the clock of the file system."""
    touch(clock)
    found = changed(file)
    now = changed(clock)
    if found is None or now is None or _is_dead(other, own) or _is_copy(file, other):
        return True
    return not _is_alive(other, own) and now - found > _SILENT_S


def _is_copy(file: AnyPath, owner: _Owner) -> bool:
    """Whether a file is a copy of this process's lock, made by copying its directory."""
    held = _HELD.get(owner.name)
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
