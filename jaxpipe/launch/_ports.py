"""Ports of the coordinator, and the addresses of this machine."""

import contextlib
import random
import socket

from jaxpipe.errors import LaunchError

# Below the range that systems assign automatically, so that no connection takes the port before
# the coordinator does.
_FIRST = 20000
_LAST = 32000


def free_port() -> int:
    """A port of this machine that is not in use."""
    numbers = random.SystemRandom()
    while not _is_free(port := numbers.randrange(_FIRST, _LAST)):
        pass
    return port


def check_port(port: int, option: str) -> None:
    """Refuse a port that is in use on this machine, or that this user may not use."""
    if not _is_free(port):
        raise LaunchError(
            f"{option} must be a free port of this machine, but got port {port}, which is in use. "
            f"End the program that uses it, or give {option} another port."
        )


def is_here(host: str) -> bool:
    """True if a socket can be bound here to a name, or to an address without brackets."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as tried:
                tried.bind(address)
                return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            tried.bind(("", port))
            return True
    return False
