"""The lock on a directory of checkpoints.

One job at a time saves there, from its first save to its end.

    save_dir/.lock/<since>-<pid>-<start>-<place>-<nonce>-<host>

The folder appears with the one file in it, by a rename, which only one of several can do, on
network file systems too. The file is empty, so that it is never half written and fits on a full
disk: its name tells whose it is, and its time of change is the owner's last sign of life. The file
of an owner that is gone is removed by its name, which no other has: several that take over at once
cannot remove each other's.

A store has no rename, and not every one writes an object on the condition that there is none. There
each writes its own object and lists the folder after that: who finds itself alone holds the lock.
Of two the later one to write finds the other, on every store whose lists show what was written
before, as those of S3, Google Cloud and Azure do; so there are never two.
"""

import contextlib
import datetime
import errno
import hashlib
import os
import re
import secrets
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from jaxpipe._stores import AnyPath, StorePath
from jaxpipe.errors import CheckpointError

from ._storage import changed, identity, is_same, touch

LOCK = ".lock"

_BEAT_S, _SILENT_S = 5.0, 60.0
"""Between signs of life, and without one until an owner on another machine counts as gone."""
_POLL_S = 0.25
_YIELD_S = 2.0
"""How long on a store one of two that want the lock waits for the other to withdraw."""
_TAKEN_TEXT = "taken"
"""Content of the object of the owner on a store; that of one that asks for the lock is empty."""
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_NAME = re.compile(
    r"([0-9]{1,11})-([0-9]{1,10})-([0-9]*)-([0-9a-f]{8})-([0-9a-f]{8})-(.+)", re.DOTALL
)
_TEMPORARY = re.compile(r"\.lock-[0-9a-f]{8}")


@dataclass(frozen=True)
class _Owner:
    """Process that holds the lock.

    Attributes:
        since: When it was taken, in seconds of the epoch.
        pid: The process.
        start: When that process began, in ticks of its machine; empty where the system does not
            tell.
        place: Hash of all that process numbers depend on: machine, its last start, and container;
            and of the directory, so that a copy of it is not held by whoever holds the first.
        nonce: Makes the name its own.
        host: The machine's name.
    """

    since: str
    pid: str
    start: str
    place: str
    nonce: str
    host: str

    @property
    def name(self) -> str:
        """Of its file."""
        return "-".join((self.since, self.pid, self.start, self.place, self.nonce, self.host))


class DirectoryLock:
    """A lock that this process holds; in a job of several processes one holds it for all.

    Raises CheckpointError where somebody else holds it: who, and since when. An owner that has died
    is not waited for; on another machine only silence shows that, after a minute. Raises OSError
    where the directory cannot be written.
    """

    def __init__(self, save_dir: AnyPath) -> None:
        self._owner = _new_owner(save_dir)
        self._file = save_dir / LOCK / self._owner.name
        self._runs: set[int] = set()
        self._is_saving = True
        self._released = threading.Event()
        _HELD[self._owner.name] = self  # before others of this process can see the file
        try:
            _take(save_dir, self._owner)
        except BaseException:
            del _HELD[self._owner.name]
            raise
        threading.Thread(target=self._beat, daemon=True, name="checkpoint lock").start()

    @classmethod
    def begin_save(cls, save_dir: AnyPath) -> "DirectoryLock":
        """Lock a directory for a save, or use the lock that a run of this process holds there.

        Raises like the class, and CheckpointError where another save of this process is under way
        there.
        """
        for file in _files(save_dir / LOCK):
            held = _HELD.get(file.name)
            if held is not None and held.is_at(file):
                with _GUARD:
                    if not held._is_saving:
                        held._is_saving = True
                        return held
        return cls(save_dir)

    def end_save(self, run: object, *, is_kept: bool) -> None:
        """Let another save of this process begin.

        With `is_kept` the lock is held for `run`, which saved, until it is deleted or the program
        ends. Else the lock is given back, unless it is held for a run already.
        """
        if is_kept and id(run) not in self._runs:
            self._runs.add(id(run))
            weakref.finalize(run, self._forget, id(run))
        self._is_saving = False
        if not self._runs:
            self.release()

    def check(self) -> None:
        """Make sure that it is still held.

        Raises OSError where it is not: this process was silent too long, or somebody removed it.
        """
        with contextlib.suppress(FileNotFoundError):
            touch(self._file)
            if not isinstance(self._file, StorePath) or _is_alone(self._file):
                return
        others = [file for file in _files(self._file.parent) if file != self._file]
        names = " and ".join(_describe(_owner_of(file)) for file in others) or "nobody"
        if isinstance(self._file, StorePath):
            self.release()  # neither of two that have it commits while both do
        raise OSError(f"this job lost its lock on the directory, which is now held by {names}")

    def release(self) -> None:
        """Give it back; nothing happens where it is lost."""
        if self._owner.pid != str(os.getpid()):  # a fork of the process that holds it
            return
        # First: what cannot be removed now, in an outage, is then nobody's.
        _HELD.pop(self._owner.name, None)
        self._released.set()
        with contextlib.suppress(OSError):
            self._file.unlink()
        with contextlib.suppress(OSError):  # another job has taken it since
            self._file.parent.rmdir()

    def is_at(self, file: AnyPath) -> bool:
        """True if this process has not forked since, and the file is the lock's own.

        No copy of it elsewhere.
        """
        return self._owner.pid == str(os.getpid()) and is_same(self._file, file)

    def _forget(self, run: int) -> None:
        self._runs.discard(run)
        if not self._runs and not self._is_saving:
            self.release()

    def _beat(self) -> None:
        while not self._released.wait(_BEAT_S):
            try:
                touch(self._file)
                if self._released.is_set():  # meanwhile, so that this has written it again
                    self._file.unlink(missing_ok=True)
            except FileNotFoundError:  # it is lost
                return
            except OSError:  # an outage, which may end
                continue


_GUARD = threading.Lock()
_HELD: dict[str, DirectoryLock] = {}
"""What this process holds, by the names of the files.

It is the process that holds a lock, for all of its engines.
"""


def _take(save_dir: AnyPath, owner: _Owner) -> None:
    if isinstance(save_dir, StorePath):
        _take_on_store(save_dir, owner)
        return
    folder, mine = save_dir / LOCK, save_dir / f"{LOCK}-{owner.nonce}"
    mine.mkdir()
    try:
        (mine / owner.name).touch()
        while not _renamed(mine, folder, owner):
            for file in _files(folder):
                _wait_until_gone(save_dir, file, owner, mine / owner.name)
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where a rename does not replace an empty folder
                folder.rmdir()
    finally:
        _remove(mine)  # after a success it has been renamed
    # Leftovers of killed processes; the lock is taken, removed or not.
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
                # Of two that begin at once the one of the later name withdraws, as soon as it sees
                # a sign of life of the other. It stays if it holds the lock.
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
    """False if another job holds the lock too, which took this one for dead.

    What was written here as a sign of life may have come after the other had removed the object.
    """
    gives_up_by = time.monotonic() + _YIELD_S
    while others := [file for file in _files(mine.parent) if file != mine]:
        for file in others:
            with contextlib.suppress(FileNotFoundError):
                if isinstance(file, StorePath) and file.read_text() == _TAKEN_TEXT:
                    return False
        # The rest ask for it, and withdraw when they see this one change, or were killed.
        if time.monotonic() > gives_up_by:
            return True
        time.sleep(_POLL_S)
        touch(mine)
    return True


def _renamed(mine: Path, folder: Path, owner: _Owner) -> bool:
    try:
        mine.rename(folder)
    except OSError as error:
        # A network file system asked twice, and reports the second answer.
        if (folder / owner.name).exists():
            return True
        if error.errno in _TAKEN:
            return False
        raise
    return True


def _remove(folder: Path) -> None:
    """Remove a folder of this module's, unless it holds what is none of it."""
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
    """Whose file it is; of a name that is no owner's only the host is filled in."""
    found = _NAME.fullmatch(file.name)
    return _Owner(*found.groups()) if found else _Owner("", "", "", "", "", file.name)


def _wait_until_gone(save_dir: AnyPath, file: AnyPath, own: _Owner, clock: AnyPath) -> None:
    """Return when an owner is gone; raise as soon as it is known to be there."""
    first, other = changed(file), _owner_of(file)
    while not _is_gone(file, own, clock):
        if _is_alive(other, own) or changed(file) not in (first, None):
            raise _held(save_dir, other, own)
        time.sleep(_POLL_S)


def _is_gone(file: AnyPath, own: _Owner, clock: AnyPath) -> bool:
    """True if an owner has died, or been silent for long by the clock of the file system."""
    touch(clock)
    found, now, other = changed(file), changed(clock), _owner_of(file)
    if found is None or now is None or _is_dead(other, own) or _is_copy(file):
        return True
    return not _is_alive(other, own) and now - found > _SILENT_S


def _is_copy(file: AnyPath) -> bool:
    """True for a copy of a lock that this process holds, made with the directory it lies in."""
    held = _HELD.get(file.name)
    return held is not None and not held.is_at(file)


def _is_dead(other: _Owner, own: _Owner) -> bool:
    """True if a process of this place is known to have ended, or this one gave the lock back.

    A process's number may be another's now.
    """
    if other.place != own.place:
        return False
    if other.pid == own.pid:
        return other.start != own.start or other.name not in _HELD
    try:
        # Signal 0 is not sent: the call only tells whether the process is there.
        os.kill(int(other.pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return _start_of(other.pid) not in ("", other.start)


def _is_alive(other: _Owner, own: _Owner) -> bool:
    return other.place == own.place and bool(other.start) and _start_of(other.pid) == other.start


def _start_of(pid: str) -> str:
    """When a process of this place began.

    Empty where the system does not tell, `ended` of one that has.
    """
    try:
        # The second field is the program's name, which may hold blanks and brackets itself: the
        # rest begins at the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "ended" if fields[0] in "ZX" else fields[19]


def _new_owner(save_dir: AnyPath) -> _Owner:
    host, pid = socket.gethostname(), str(os.getpid())
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
        f"is held by {_describe(other)}{itself}. Save again when that has ended, or give each job "
        "a directory of its own."
    )
