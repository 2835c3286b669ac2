"""Parsing and formatting the addresses of hosts and of the coordinator."""

import ipaddress

from jaxpipe.errors import LaunchError, shown

from ._numbers import whole_number

DEFAULT_PORT = 29500
"""The default port of the coordinator in DeepSpeed and torch."""


def is_ipv6(host: str) -> bool:
    """True for an IPv6 address without brackets."""
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """Put an IPv6 address in brackets, so that a port can follow; another host is unchanged."""
    return f"[{host}]" if is_ipv6(host) else host


def read_address(text: str, what: str = "the coordinator's address") -> tuple[str, int]:
    """Split `host:port`, with an IPv6 host in brackets; `what` names the address in errors."""
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
