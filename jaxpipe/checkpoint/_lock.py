"""The lock on a directory of checkpoints.

Only one job at a time saves to a directory, from its first save there until the job ends. The lock
names its owner, and the time of its last write is the owner's last heartbeat. How it is taken
depends on the storage: `FolderLock` on a file system, `ObjectLock` on an object store.
"""

import abc
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from typing import Any, ClassVar, Self

from jaxpipe.errors import CheckpointError

from ._owner import Owner
from ._storage import changed, identity, is_same, touch

LOCK = ".lock"

_BEAT_S = 5.0
_SILENT_S = 60.0
"""Seconds between heartbeats, and seconds without one after which a remote owner counts as dead."""
_POLL_S = 0.25


class Lock(abc.ABC):
    """A lock that this process holds; in a job of several processes, one holds it for all.

    It belongs to the process and covers all of its engines. Raises CheckpointError if another
    process holds the lock; the error says which, and since when. The lock of a dead process is
    taken over. If that process ran on another machine, it counts as dead after a minute without a
    heartbeat. Raises OSError if the directory cannot be written.

    Attributes:
        known: The commits of the directory, by tag, as far as saves of this process have read or
            written them. They cannot change as long as the lock excludes other jobs.
    """

    object_name: ClassVar[str] = ""
    """Name of the lock's file, if it is not that of the owner."""

    is_near: ClassVar[bool] = False
    """Whether storage answers at once."""

    def __init__(self, save_dir: Any, owner: Owner | None = None) -> None:
        self.known: dict[str, Any] = {}
        self._save_dir = save_dir
        self._folder = save_dir / LOCK
        self._owner = owner or Owner.here(identity(save_dir))
        self._file = self._folder / (self.object_name or self._owner.name)
        # A file of this process, whose writes tell the time by the clock of the storage.
        self._clock = self._folder / self._owner.name
        self._pid = os.getpid()
        self._runs: set[int] = set()
        self._is_saving = True
        # Ends the thread, and says whether it is to remove the lock. The garbage collector may call
        # `_forget` in that thread too, amid a wait. A `SimpleQueue` allows that; an `Event` would
        # deadlock.
        self._ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
        _HELD[self._owner.name] = self  # before other threads of this process can see the file
        try:
            self._take()
        except BaseException:
            self.release()  # it may have been taken, with the answer lost
            raise
        threading.Thread(target=self._keep, daemon=True, name="checkpoint lock").start()
        atexit.register(self._end)

    @staticmethod
    @abc.abstractmethod
    def owners(folder: Any) -> list[tuple[Any, Owner]]:
        """The files of a lock, and their owners."""

    @abc.abstractmethod
    def _take(self) -> None:
        """Take the lock, from dead owners too."""

    @abc.abstractmethod
    def _beat(self) -> None:
        """Give a sign of life; raises FileNotFoundError if the lock is lost."""

    @abc.abstractmethod
    def _remove(self) -> None:
        """Remove the lock, unless it is lost or storage fails."""

    @staticmethod
    def _held(owner: Owner) -> "Lock | None":
        """The lock that this process holds as this owner. A fork holds none of its parent's."""
        lock = _HELD.get(owner.name)
        return lock if lock is not None and lock._pid == os.getpid() else None

    @classmethod
    def begin_save(cls, save_dir: Any) -> Self:
        """Lock a directory for a save, or use the lock that a run of this process holds there."""
        for file, owner in cls.owners(save_dir / LOCK):
            held = cls._held(owner)
            if isinstance(held, cls) and is_same(held._file, file):
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
            self._beat()
            return
        # This process missed its heartbeats for too long, or somebody removed the file.
        owners = [owner for _, owner in self.owners(self._folder) if owner != self._owner]
        names = " and ".join(map(str, owners)) or "nobody"
        raise OSError(f"this job lost its lock on the directory, which is now held by {names}")

    def release(self) -> None:
        """Release the lock; does nothing if it is lost."""
        if self._let_go():
            self._remove()

    def _let_go(self, *, by_thread: bool = False) -> bool:
        """End the thread; returns whether this process held the lock, and is no fork of it.

        With `by_thread`, the thread removes the lock.
        """
        if self._pid != os.getpid():
            return False
        # Forget the lock first: a file that an outage keeps from being removed then has no owner.
        _HELD.pop(self._owner.name, None)
        self._ends.put(by_thread)
        return True

    def _forget(self, run: int) -> None:
        self._runs.discard(run)
        if self._runs or self._is_saving:
            return
        # The garbage collector calls this amid any other work, which a store that does not answer
        # must not hold up: there the thread removes the lock.
        if self._let_go(by_thread=not self.is_near) and self.is_near:
            self._remove()

    def _end(self) -> None:
        """Release the lock when the program ends, which stops the thread at any line."""
        if not self._is_saving:
            self.release()

    def _keep(self) -> None:
        """Give signs of life until the lock is released or lost."""
        is_lost = False
        removes = None
        while removes is None:
            try:
                removes = self._ends.get(timeout=None if is_lost else _BEAT_S)
            except queue.Empty:
                try:
                    self._beat()
                except FileNotFoundError:
                    is_lost = True
                except OSError:  # an outage may end
                    pass
        if removes:
            self._remove()
        atexit.unregister(self._end)

    def _wait_until_gone(self, file: Any, other: Owner) -> None:
        """Block until an owner is known to be dead; raise as soon as it is known to be alive."""
        first = changed(file)
        while not self._is_gone(file, other):
            if self._lives(other) or changed(file) not in (first, None):
                raise self._refused(other)
            time.sleep(_POLL_S)

    def _is_gone(self, file: Any, other: Owner) -> bool:
        """Whether an owner has died, or has missed heartbeats by the clock of the storage."""
        touch(self._clock)
        found = changed(file)
        now = changed(self._clock)
        held = self._held(other)
        # A copy of a lock of this process, made by copying its directory, has no owner.
        if found is None or now is None or (held is not None and not is_same(held._file, file)):
            return True
        lives = self._lives(other)
        return now - found > _SILENT_S if lives is None else not lives

    def _lives(self, other: Owner) -> bool | None:
        """Whether another owner still holds the lock. None: this cannot be known from here."""
        if other.place != self._owner.place:
            return None
        if (
            other.pid == self._owner.pid and self._held(other) is None
        ):  # this process has released it
            return False
        return other.is_running

    def _refused(self, other: Owner) -> CheckpointError:
        own = self._owner
        is_own = (other.place, other.pid) == (own.place, own.pid)
        itself = ", which is this process" if is_own else ""
        return CheckpointError(
            "save_dir must be written by one job at a time, but got "
            f"save_dir={str(self._save_dir)!r}, which is held by {other}{itself}. Save again when "
            "that process has ended, or give each job its own directory."
        )


_GUARD = threading.Lock()
_HELD: dict[str, Lock] = {}
"""The locks that this process holds, by the name of the owner."""
