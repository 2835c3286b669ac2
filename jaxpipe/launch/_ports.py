"""Ports and addresses of the coordinator."""

import contextlib
import random
import socket

from jaxpipe.distributed import DEFAULT_PORT, whole_number
from jaxpipe.errors import LaunchError, shown

_NUM_PORTS = 65536
# Below what systems hand out by themselves, so that no connection takes the port before the coordinator does.
_FIRST, _LAST = 20000, 32000
_TRIES = 100


def free_port() -> int:
    """A port of this machine that nothing uses now.

    Returns:
        The port.
    """
    numbers = random.SystemRandom()
    for _ in range(_TRIES):
        port = numbers.randrange(_FIRST, _LAST)
        if _is_free(port):
            return port
    with socket.socket() as any_free:
        any_free.bind(("", 0))
        return any_free.getsockname()[1]


def check_port(port: int, option: str) -> None:
    """Refuse a port that something uses.

    Args:
        port: The port.
        option: What the user gave it with.

    Raises:
        LaunchError: Something on this machine uses it, or this user may not.
    """
    if not _is_free(port):
        raise LaunchError(
            f"{option} must be a free port of this machine, but got port {port}, which is in use. "
            f"End what uses it, or give {option} another port."
        )


def read_address(text: str) -> tuple[str, int]:
    """Take `HOST:PORT` apart.

    Args:
        text: The address; an IPv6 host in brackets.

    Returns:
        Host and port.

    Raises:
        LaunchError: It is not of this form.
    """
    host, _, port = text.rpartition(":")
    number = whole_number(port) or 0
    plain = host.startswith("[") and host.endswith("]") or ":" not in host
    if not host or not plain or not 0 < number < _NUM_PORTS:
        raise LaunchError(
            f"--coordinator must be HOST:PORT, but got --coordinator {shown(text)}. "
            f"Write for instance worker-0:{DEFAULT_PORT}."
        )
    return host, number


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            tried.bind(("", port))
            return True
    return False
