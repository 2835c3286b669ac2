"""The lock on a directory of a file system.

    save_dir/.lock/<since>-<pid>-<start>-<place>-<nonce>-<host>

The folder is created by a rename, with its one file already in it. Only one of several processes
can succeed in that rename, on network file systems too. The file is empty, so it is never half
written and fits on a full disk: its name identifies the owner, and its modification time is the
owner's last heartbeat. The file of a dead owner is removed by its name. Names are unique, so
processes that take over at the same time cannot remove each other's files.
"""

import contextlib
import errno
import re
from pathlib import Path

from ._lock import LOCK, Lock
from ._owner import Owner
from ._storage import touch

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_TEMPORARY = re.compile(r"\.lock-[0-9a-f]{8}")


class FolderLock(Lock):
    """A lock on a directory of a file system."""

    is_near = True

    @staticmethod
    def owners(folder: Path) -> list[tuple[Path, Owner]]:
        """The files of a lock, and their owners."""
        with contextlib.suppress(FileNotFoundError):
            return [(file, Owner.of(file.name)) for file in folder.iterdir()]
        return []

    def _take(self) -> None:
        temporary = self._save_dir / f"{LOCK}-{self._owner.nonce}"
        temporary.mkdir()
        self._clock = temporary / self._owner.name
        try:
            self._clock.touch()
            while not self._is_renamed(temporary):
                for file, other in self.owners(self._folder):
                    self._wait_until_gone(file, other)
                    file.unlink(missing_ok=True)
                # Some systems do not let a rename replace an empty folder.
                with contextlib.suppress(OSError):
                    self._folder.rmdir()
        finally:
            self._remove_folder(temporary)  # only left if the rename did not succeed
        self._clock = self._file
        # Remove leftovers of killed processes. The lock is taken even if that fails.
        with contextlib.suppress(OSError):
            for left in [
                path
                for path in self._save_dir.iterdir()
                if _TEMPORARY.fullmatch(path.name) and not path.is_symlink()
            ]:
                owners = self.owners(left) or [(left, Owner.of(left.name))]
                if all(self._is_gone(file, other) for file, other in owners):
                    self._remove_folder(left)

    def _is_renamed(self, temporary: Path) -> bool:
        """Try to make a folder the lock; returns whether this process holds it."""
        try:
            temporary.rename(self._folder)
        except OSError as error:
            # A network file system may send a rename twice and report the result of the second try.
            if self._file.exists():
                return True
            if error.errno in _TAKEN:
                return False
            raise
        return True

    def _remove_folder(self, folder: Path) -> None:
        """Remove a folder that a lock made, unless it has other files in it."""
        with contextlib.suppress(OSError):
            for file, owner in self.owners(folder):
                if owner.pid:
                    file.unlink()
            folder.rmdir()

    def _beat(self) -> None:
        touch(self._file)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink()
        with contextlib.suppress(OSError):  # another job has taken it since
            self._folder.rmdir()
