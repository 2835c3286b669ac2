import re
import socket
from functools import partial

import pytest
from _refusals import check_refused

from jaxpipe.distributed import read_address
from jaxpipe.errors import LaunchError
from jaxpipe.launch._ports import check_port, free_port, is_here


def test_a_free_port_can_be_used() -> None:
    port = free_port()
    check_port(port, "--port")
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


@pytest.mark.parametrize("address", ["127.0.0.1", ""], ids=["loopback", "everywhere"])
def test_a_port_in_use_is_named(address: str) -> None:
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(
            LaunchError,
            match=rf"--port must be a free port.*got port {port}, which is in use\. End the",
        ):
            check_port(port, "--port")


def test_addresses() -> None:
    assert read_address("worker-0:29500") == ("worker-0", 29500)
    assert read_address("[fd00::1]:1") == ("fd00::1", 1)
    assert read_address("[fe80::1%eth0]:80") == ("fe80::1%eth0", 80)


WRONG = ["", "worker-0", "worker-0:", ":29500", "worker-0:0", "worker-0:65536", "a:x", "a:1:2"]
WRONG += ["fd00::1:5", "::1", "[::1]", "[::1]:", "[a]:1", "[]:1", "[::1:1", "[[::1]]:1", "[b:1]:2"]


def test_wrong_addresses() -> None:
    table = [
        (
            rf"--coordinator must be host:port.*{re.escape(repr(text))}.*Write for instance "
            "worker-0:29500, or",
            partial(read_address, text, "--coordinator"),
        )
        for text in WRONG
    ]
    check_refused(LaunchError, table)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.9", socket.gethostname()])
def test_names_of_this_machine(host: str) -> None:
    assert is_here(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "no-such.invalid", "a" * 70, "a..b"])
def test_names_of_other_machines(host: str) -> None:
    assert not is_here(host)
