import subprocess
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    "line",
    [
        "worker-1",
        "worker-1 slots=",
        "worker-1 slots=0",
        "worker-1 slots=-1",
        "worker-1 slots=two",
        "worker-1 slots = 4",
        "worker-1 slots=4 max_slots=8",
        "worker-1 slots=99999",
        "slots=4",
        "user@worker-1 slots=4",
        "-oProxyCommand=x slots=4",
        "a:b slots=1",
        "[a] slots=1",
        "fd00::1::2 slots=1",
        "fd00::10:8 slots",
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path, f"worker-0 slots=4\n\n{line}\n")
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    for part in (
        f"{path}, line 3 must be 'name slots=N'",
        f"but got {line!r}",
        "Write for instance 'worker-0 slots=8'.",
    ):
        assert part in str(caught.value)


def test_a_node_named_twice(tmp_path: Path) -> None:
    path = _file(tmp_path, "a slots=1\nb slots=1\na slots=2\n")
    with pytest.raises(
        LaunchError,
        match=r"line 3 must name a new node, but got 'a', which line 1 names\. Keep one",
    ):
        read_hostfile(path)


@pytest.mark.parametrize("text", ["", "# nothing\n\n"], ids=["empty", "comments"])
def test_a_file_without_nodes(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        LaunchError,
        match=r"hosts must name at least one node.*Write a line such as 'worker-0 slots=8'",
    ):
        read_hostfile(_file(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"--hostfile must be a text file.*none: .*No such file.*Give the path"
    ):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(
        LaunchError, match=r"--hostfile must be a text file.*binary: .*decode.*Give the path"
    ):
        read_hostfile(tmp_path / "binary")


def test_a_number_of_any_length(tmp_path: Path) -> None:
    path = _file(tmp_path, f"worker-0 slots={'9' * 5000}\n")
    with pytest.raises(
        LaunchError,
        match=r"line 1 must be .* but got 'worker-0 slots=9+'\.\.\. \(5015 characters\)\. W",
    ):
        read_hostfile(path)
    assert (
        str(read_hostfile(_file(tmp_path, f"worker-0 slots={'0' * 5000}2\n"))[0]) == "worker-0:0,1"
    )


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"--hostfile must be a text file.*Is a directory.*Give the path"
    ):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"a slots=1\x00\x1b[31m\n")
    with pytest.raises(LaunchError, match=r"line 1 must be .*but got 'a slots=1\\x00\\x1b\[31m'"):
        read_hostfile(tmp_path / "binary")


def test_a_pipe_that_somebody_writes_to() -> None:
    """As a shell's `<(command)`."""
    command = ["sh", "-c", "sleep 0.5; echo worker-0 slots=2; sleep 0.5; echo worker-1 slots=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        nodes = read_hostfile(Path(f"/dev/fd/{writer.stdout.fileno()}"))
    assert [str(node) for node in nodes] == ["worker-0:0,1", "worker-1:0"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "worker-0:0,1,2,3@worker-1:0,1,2,3@worker-2:0,1"),
        ({"include": "worker-1"}, "worker-1:0,1,2,3"),
        ({"include": "worker-2@worker-1:2,0"}, "worker-1:0,2@worker-2:0,1"),
        ({"exclude": "worker-1"}, "worker-0:0,1,2,3@worker-2:0,1"),
        ({"exclude": "worker-0:1,2@worker-2"}, "worker-0:0,3@worker-1:0,1,2,3"),
        ({"exclude": "worker-2:0,1"}, "worker-0:0,1,2,3@worker-1:0,1,2,3"),
        ({"num_nodes": 2}, "worker-0:0,1,2,3@worker-1:0,1,2,3"),
        ({"num_gpus": 1}, "worker-0:0@worker-1:0@worker-2:0"),
        ({"num_nodes": 2, "num_gpus": 3}, "worker-0:0,1,2@worker-1:0,1,2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "all",
)
def test_choices(options: dict[str, object], expected: str) -> None:
    chosen = choose_nodes(NODES, **options)
    assert "@".join(map(str, chosen)) == expected


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "worker-9",
            r"must name nodes of the hostfile, but got 'worker-9'.*It has worker-0 slots=4, "
            r"worker-1 slots=4",
        ),
        (
            "worker-2:0,2",
            r"must name slots that worker-2 has, but got slot 2 in .*It has slots 0 to 1\.",
        ),
        (
            "worker-0:",
            r"'worker-0:' is neither a name nor a name and slots\. Write for instance "
            r"worker-0@worker-1:0,2",
        ),
        ("worker-0:a", r"'worker-0:a' is neither"),
        ("worker-0:0,,1", r"'worker-0:0,,1' is neither"),
        ("worker-0@@worker-1", r"'' is neither"),
        ("worker-0,worker-1", r"'worker-0,worker-1' is neither"),
        ("worker-0@worker-0:1", r"'worker-0:1' names worker-0 a second time\. Write for instance"),
        ("worker-0:1,1", r"'worker-0:1,1' names slot 1 a second time\. Write for instance"),
        (
            f"worker-0:{'9' * 5000}",
            r"'worker-0:9+'\.\.\. \(5009 characters\) is neither a name nor",
        ),
    ],
)
def test_wrong_choices(option: str, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=rf"--{option} .*{message}"):
        choose_nodes(NODES, **{option: text})


def test_choices_exclude_each_other() -> None:
    with pytest.raises(LaunchError, match=r"one way, but got --include and --exclude\. Keep one"):
        choose_nodes(NODES, include="worker-0", exclude="worker-1")
    with pytest.raises(
        LaunchError, match=r"one way, but got --exclude and --num_nodes or --num_gpus\. Keep one"
    ):
        choose_nodes(NODES, exclude="worker-1", num_gpus=1)


def test_nothing_is_left() -> None:
    with pytest.raises(
        LaunchError,
        match=r"--exclude must leave at least one slot.*worker-2 slots=2; exclude fewer",
    ):
        choose_nodes(NODES, exclude="worker-0@worker-1@worker-2:0,1")


def test_more_than_there_are() -> None:
    with pytest.raises(
        LaunchError, match=r"at most the 3 nodes of the hostfile, but got --num_nodes 4\. It has"
    ):
        choose_nodes(NODES, num_nodes=4)
    with pytest.raises(
        LaunchError, match=r"--num_gpus 3 and worker-2 has slots=2.*with --exclude worker-2"
    ):
        choose_nodes(NODES, num_gpus=3)


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
