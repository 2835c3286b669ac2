"""Addresses of hosts and of the coordinator as text."""

import ipaddress

from jaxpipe.errors import LaunchError, shown

from ._numbers import whole_number

DEFAULT_PORT = 29500
"""DeepSpeed's and torch's port of the coordinator."""


def is_ipv6(host: str) -> bool:
    """True for an IPv6 address, without brackets."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """A host as it stands before a colon: an IPv6 address in brackets, all else as it is.

    Args:
        host: A name, an IPv4 address, or an IPv6 address with brackets or without.

    Returns:
        The text.
    """
    return f"[{host}]" if is_ipv6(host) else host


def read_address(text: str, what: str = "the coordinator's address") -> tuple[str, int]:
    """Take `host:port` apart.

    Args:
        text: The address; an IPv6 host in brackets.
        what: What it is called in an error.

    Returns:
        The host, without brackets, and the port.

    Raises:
        LaunchError: It is not of this form.
    """
    before, _, after = text.rpartition(":")
    port = whole_number(after) or 0
    inner = before[1:-1] if before.startswith("[") and before.endswith("]") else ""
    host = inner if is_ipv6(inner) else before
    is_host = host == inner or not set(before) & set("[]:")
    if not host or not is_host or not 0 < port < 65536:
        raise LaunchError(
            f"{what} must be host:port, but got {shown(text)}. Write for instance "
            f"worker-0:{DEFAULT_PORT}, or [fd00::1]:{DEFAULT_PORT} with the brackets of IPv6."
        )
    return host, port
