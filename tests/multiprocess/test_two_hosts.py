"""Two network namespaces as two hosts, joined by a cable.

The launcher starts them through a stand-in for ssh.
"""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _job import environment
from _layouts import Layout, train
from _tolerances import ROUNDING, assert_loss

SCRIPT = Path(__file__).with_name("_train_here.py")
HOSTS = {"10.77.31.1": "jaxpipe-a", "10.77.31.2": "jaxpipe-b"}


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _may_make_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    made = (
        subprocess.run(
            ["ip", "netns", "add", "jaxpipe-probe"], check=False, capture_output=True
        ).returncode
        == 0
    )
    if made:
        _run("ip", "netns", "del", "jaxpipe-probe")
    return made


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """A hostfile of the two; each knows its own name by its own address only."""
    if not _may_make_namespaces():
        pytest.skip("network namespaces need root and the command ip")
    first, second = HOSTS.values()
    names = [Path("/etc/netns") / name for name in HOSTS.values()]
    try:
        for (address, name), folder in zip(HOSTS.items(), names, strict=True):
            _run("ip", "netns", "add", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
        _run(
            "ip",
            "link",
            "add",
            "cable",
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            second,
        )
        for address, name in HOSTS.items():
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        path = tmp_path / "hosts"
        path.write_text("".join(f"{address} slots=1\n" for address in HOSTS))
        yield path
    finally:
        for name, folder in zip(HOSTS.values(), names, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_training_over_two_hosts(hosts: Path, tmp_path: Path) -> None:
    stand_in = tmp_path / "ssh"
    cases = " ".join(f"{address}) space={name};;" for address, name in HOSTS.items())
    stand_in.write_text(
        f'#!/bin/sh\ncase $1 in {cases} esac\nexec ip netns exec $space sh -c "$2"\n'
    )
    stand_in.chmod(0o755)
    options = [
        "--hostfile",
        hosts,
        "--ssh-command",
        stand_in,
        "--cpu-devices",
        "1",
        "--export",
        "XLA_FLAGS",
    ]
    command = [sys.executable, "-m", "jaxpipe.launch", *options, SCRIPT, tmp_path]
    done = subprocess.run(
        list(map(str, command)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [(tmp_path / f"losses{i}").read_text().split() for i in range(2)]
    alone = Layout(2, 1)
    wanted = train(alone.engine(), alone, range(3))
    for losses in found:
        assert_loss(list(map(float, losses)), wanted, tolerance=ROUNDING)
    addresses = {(tmp_path / f"address{i}").read_text() for i in range(2)}
    assert addresses == set(HOSTS)
