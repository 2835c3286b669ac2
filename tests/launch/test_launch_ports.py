import socket

import pytest

from jaxpipe.errors import LaunchError
from jaxpipe.launch._ports import check_port, free_port, read_address


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
            LaunchError, match=rf"--port must be a free port.*got port {port}, which is in use\. End what"
        ):
            check_port(port, "--port")


def test_addresses() -> None:
    assert read_address("worker-0:29500") == ("worker-0", 29500)
    assert read_address("[fd00::1]:1") == ("[fd00::1]", 1)


@pytest.mark.parametrize(
    "text", ["", "worker-0", "worker-0:", ":29500", "worker-0:0", "worker-0:65536", "a:x", "fd00::1:5"]
)
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(
        LaunchError, match=r"--coordinator must be HOST:PORT.*Write for instance worker-0:29500"
    ) as caught:
        read_address(text)
    assert repr(text) in str(caught.value)
