"""The lock on a directory of an object store.

A store has no rename, but conditional writes. The lock is one object, whose content names the
owner:

    save_dir/.lock/owner

It is created only if it does not exist, and every later write (a heartbeat, a release, the takeover
from a dead owner) names the version that it replaces. So of several writers one succeeds, and a
request that arrives late changes nothing. A release leaves the object empty: stores delete without
a condition, so a delayed deletion could remove the lock of the next owner.
"""

import contextlib
import errno
import secrets
from collections.abc import Mapping

from jaxpipe._util.stores import StorePath, read_version, replace_version

from ._lock import Lock
from ._owner import Owner

_OBJECT = "owner"


class ObjectLock(Lock):
    """A lock on a directory of an object store."""

    object_name = _OBJECT

    @staticmethod
    def owners(folder: StorePath) -> list[tuple[StorePath, Owner]]:
        """The object of a lock with its owner, if there is one."""
        name, _ = _read(folder / _OBJECT)
        return [(folder / _OBJECT, Owner.of(name))] if name else []

    def _take(self) -> None:
        while True:
            name, version = _read(self._file)
            if name == self._owner.name:
                return
            if name:
                try:
                    self._wait_until_gone(self._file, Owner.of(name))
                finally:
                    with contextlib.suppress(OSError):
                        self._clock.unlink()
            # Whether this has succeeded is read: the answer may be that to a second attempt.
            replace_version(self._file, version, self._owner.name)

    def _beat(self) -> None:
        # New at each write, because the version of an object may be a hash of its content.
        if not self._replace(f"{self._owner.name}\n{secrets.token_hex(8)}"):
            raise FileNotFoundError(errno.ENOENT, "the lock is lost", str(self._file))

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._replace("")

    def _replace(self, content: str) -> bool:
        """Replace the object; False if it is another's."""
        # More than once if the answer is lost, or two threads write at the same time.
        while True:
            name, version = _read(self._file)
            if name != self._owner.name:
                return False
            if replace_version(self._file, version, content):
                return True


def _read(file: StorePath) -> tuple[str, Mapping[str, str]]:
    """Read an owner's name, which is empty if the lock is free, and the version of the object."""
    content, version = read_version(file)
    return content.partition("\n")[0], version
