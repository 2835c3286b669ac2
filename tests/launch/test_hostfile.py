import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _refusals import check_refused

from jaxpipe.errors import LaunchError
from jaxpipe.launch._hostfile import choose_nodes, read_hostfile
from jaxpipe.launch._layout import Node

NODES = (Node("worker-0", (0, 1, 2, 3)), Node("worker-1", (0, 1, 2, 3)), Node("worker-2", (0, 1)))


def _file(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


def test_reads_names_and_slots(tmp_path: Path) -> None:
    text = (
        "\ufeff# the cluster\n\nworker-0 slots=4\r\n  worker-1\tslots=4  # the new one\n"
        "10.0.0.7 slots=2"
    )
    nodes = read_hostfile(_file(tmp_path, text))
    assert [str(node) for node in nodes] == ["worker-0:0,1,2,3", "worker-1:0,1,2,3", "10.0.0.7:0,1"]


def test_reads_ipv6_addresses(tmp_path: Path) -> None:
    text = "fd00::10 slots=4\n[fd00::7] slots=2\nfe80::1%eth0 slots=1"
    nodes = read_hostfile(_file(tmp_path, text))
    assert [node.name for node in nodes] == ["fd00::10", "fd00::7", "fe80::1%eth0"]
    assert str(nodes[0]) == "[fd00::10]:0,1,2,3"
    assert choose_nodes(nodes, include="fd00::7@[fd00::10]:1,3") == (
        Node("fd00::10", (1, 3)),
        Node("fd00::7", (0, 1)),
    )
    left = choose_nodes(nodes, exclude="[fd00::10]@[fd00::7]:0@fe80::1%eth0")
    assert left == (Node("fd00::7", (1,)),)


WRONG_LINES = [
    *("worker-1", "worker-1 slots=", "worker-1 slots=0", "worker-1 slots=-1", "worker-1 slots=two"),
    *("worker-1 slots = 4", "worker-1 slots=4 max_slots=8", "worker-1 slots=99999", "slots=4"),
    *("user@worker-1 slots=4", "-oProxyCommand=x slots=4", "a:b slots=1", "[a] slots=1"),
    *("fd00::1::2 slots=1", "fd00::10:8 slots"),
]
FILES: list[tuple[Any, str]] = [
    *(
        (
            f"worker-0 slots=4\n\n{line}\n",
            rf"hosts, line 3 must be 'name slots=N'.*but got {re.escape(repr(line))}.*Write for "
            r"instance 'worker-0 slots=8'\.",
        )
        for line in WRONG_LINES
    ),
    (
        "a slots=1\nb slots=1\na slots=2\n",
        r"line 3 must name a new node, but got 'a', which line 1 names\. Keep one",
    ),
    *(
        (text, "hosts must name at least one node.*Write a line such as 'worker-0 slots=8'")
        for text in ("", "# nothing\n\n")
    ),
    (
        f"worker-0 slots={'9' * 5000}\n",
        r"line 1 must be .* but got 'worker-0 slots=9+'\.\.\. \(5015 characters\)\. W",
    ),
    (b"a slots=1\x00\x1b[31m\n", r"line 1 must be .*but got 'a slots=1\\x00\\x1b\[31m'"),
    (b"\xff\xfe\x00", "--hostfile must be a text file.*hosts: .*decode.*Give the path"),
]


def test_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    words = "--hostfile must be a text file.*"
    check_refused(
        LaunchError,
        [
            (
                rf"{words}none: .*No such file.*Give the path",
                partial(read_hostfile, tmp_path / "none"),
            ),
            (rf"{words}Is a directory.*Give the path", partial(read_hostfile, tmp_path)),
        ],
    )
    for content, words in FILES:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        check_refused(LaunchError, [(words, read_hostfile)], path)


def test_a_number_of_any_length(tmp_path: Path) -> None:
    path = _file(tmp_path, f"worker-0 slots={'0' * 5000}2\n")
    assert str(read_hostfile(path)[0]) == "worker-0:0,1"


@pytest.mark.slow
def test_a_pipe_that_somebody_writes_to() -> None:
    """As a shell's `<(command)`."""
    command = ["sh", "-c", "sleep 0.5; echo worker-0 slots=2; sleep 0.5; echo worker-1 slots=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        nodes = read_hostfile(Path(f"/dev/fd/{writer.stdout.fileno()}"))
    assert [str(node) for node in nodes] == ["worker-0:0,1", "worker-1:0"]


def test_choices() -> None:
    for options, expected in [
        ({}, "worker-0:0,1,2,3@worker-1:0,1,2,3@worker-2:0,1"),
        ({"include": "worker-1"}, "worker-1:0,1,2,3"),
        ({"include": "worker-2@worker-1:2,0"}, "worker-1:0,2@worker-2:0,1"),
        ({"exclude": "worker-1"}, "worker-0:0,1,2,3@worker-2:0,1"),
        ({"exclude": "worker-0:1,2@worker-2"}, "worker-0:0,3@worker-1:0,1,2,3"),
        ({"exclude": "worker-2:0,1"}, "worker-0:0,1,2,3@worker-1:0,1,2,3"),
        ({"num_nodes": 2}, "worker-0:0,1,2,3@worker-1:0,1,2,3"),
        ({"num_gpus": 1}, "worker-0:0@worker-1:0@worker-2:0"),
        ({"num_nodes": 2, "num_gpus": 3}, "worker-0:0,1,2@worker-1:0,1,2"),
    ]:
        chosen = choose_nodes(NODES, **options)
        assert "@".join(map(str, chosen)) == expected, options


CHOICES: list[tuple[dict[str, Any], str]] = [
    *(
        ({option: text}, rf"--{option} .*{words}")
        for option in ("include", "exclude")
        for text, words in (
            (
                "worker-9",
                "must name nodes of the hostfile, but got 'worker-9'.*It has worker-0 slots=4, "
                "worker-1 slots=4",
            ),
            ("worker-2:0,2", r"slots that worker-2 has, but got slot 2 in .*It has slots 0 to 1\."),
            (
                "worker-0:",
                r"'worker-0:' is neither a name nor a name and slots\. Write for instance "
                "worker-0@worker-1:0,2",
            ),
            ("worker-0:a", "'worker-0:a' is neither"),
            ("worker-0:0,,1", "'worker-0:0,,1' is neither"),
            ("worker-0@@worker-1", "'' is neither"),
            ("worker-0,worker-1", "'worker-0,worker-1' is neither"),
            ("worker-0@worker-0:1", r"'worker-0:1' names worker-0 a second time\. Write for inst"),
            ("worker-0:1,1", r"'worker-0:1,1' names slot 1 a second time\. Write for instance"),
            (
                f"worker-0:{'9' * 5000}",
                r"'worker-0:9+'\.\.\. \(5009 characters\) is neither a name",
            ),
        )
    ),
    (
        {"include": "worker-0", "exclude": "worker-1"},
        r"one way, but got --include and --exclude\. Keep one",
    ),
    (
        {"exclude": "worker-1", "num_gpus": 1},
        r"one way, but got --exclude and --num_nodes or --num_gpus\. Keep one",
    ),
    (
        {"exclude": "worker-0@worker-1@worker-2:0,1"},
        "--exclude must leave at least one slot.*worker-2 slots=2; exclude fewer",
    ),
    ({"num_nodes": 4}, r"at most the 3 nodes of the hostfile, but got --num_nodes 4\. It has"),
    ({"num_gpus": 3}, "--num_gpus 3 and worker-2 has slots=2.*with --exclude worker-2"),
]


def test_choices_are_refused() -> None:
    table = [(words, partial(choose_nodes, NODES, **given)) for given, words in CHOICES]
    check_refused(LaunchError, table)


def test_errors_list_the_first_of_many_nodes() -> None:
    nodes = tuple(Node(f"n{i}", (0, 1)) for i in range(3000))
    choices: list[dict[str, Any]] = [
        {"include": "m1"},
        {"num_nodes": 5000},
        {"exclude": "@".join(map(str, nodes))},
    ]
    for given in choices:
        with pytest.raises(LaunchError, match=r"n19 slots=2 and 2980 more") as caught:
            choose_nodes(nodes, **given)
        assert len(str(caught.value)) < 700
