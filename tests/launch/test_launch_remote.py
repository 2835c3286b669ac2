"""`--hostfile`.

The launcher on other nodes, through ssh, srun and mpirun, and a stand-in that starts them here.
"""

import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _launching import ROOT, is_running, launch, script, start, wait_until

from jaxpipe.launch._ports import free_port

HOSTS = "worker-0 slots=4\nworker-1 slots=2\n"

# Notes its process and waits for the others; then does what its node's number tells.
PROGRAM = """
me, count = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
here, attempt = Path(sys.argv[1]), os.environ["JAXPIPE_RESTART"]
devices = os.environ.get("JAX_LOCAL_DEVICE_IDS")
print("node", os.environ["NODE"], "devices", devices, "attempt", attempt)
(here / f"pid-{os.getpid()}").touch()
(here / f"ready-{attempt}-{me}").touch()
while len(list(here.glob(f"ready-{attempt}-*"))) < count:
    time.sleep(0.01)
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return path


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder of notes; afterwards, no process that left one is running."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    yield folder
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """Takes a node and a shell line as ssh does, and runs the line here."""
    path = tmp_path / "stand in"
    path.write_text('#!/bin/sh\nNODE=$1; export NODE; shift; cd /; exec sh -c "$*"\n')
    path.chmod(0o755)
    return shlex.quote(str(path))


def _printed(capfd: pytest.CaptureFixture[str], *words: object) -> list[list[str]]:
    """The words of each command of a dry run."""
    assert launch(*words) == 0
    return [shlex.split(line) for line in capfd.readouterr().out.splitlines()]


def test_ssh_starts_the_launcher_on_each_node(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO it is")
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    options = (
        "-H",
        hosts,
        "--include",
        "worker-0:1,3@worker-1",
        "--python",
        "/opt/py",
        "--export",
        "A=$b",
    )
    commands = _printed(
        capfd,
        *options,
        "--stall-timeout",
        60,
        "--grace",
        5,
        "--dry-run",
        "train.py",
        "--lr",
        "a 'b'",
    )
    assert [words[:-1] for words in commands] == [
        [
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=30",
            "-o",
            "ServerAliveInterval=15",
            f"worker-{i}",
        ]
        for i in range(2)
    ]
    for rank, words in enumerate(commands):
        inner = shlex.split(words[-1])
        assert inner[:5] == ["cd", str(hosts.parent), "&&", "exec", "env"]
        variables = dict(word.split("=", 1) for word in inner[5 : inner.index("/opt/py")])
        assert variables["NCCL_DEBUG"] == "INFO it is"
        assert variables["PYTHONPATH"] == str(ROOT)
        assert variables["A"] == "$b"
        assert (
            not {"JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAXPIPE_RESTART", "HOME"}
            & variables.keys()
        )
        assert inner[inner.index("/opt/py") :] == [
            *("/opt/py", "-u", "-m", "jaxpipe.launch"),
            *("--layout", ("worker-0:1,3", "worker-1:0,1")[rank], "--node-rank", "0"),
            *("--first-process", str(2 * rank), "--num-processes", "4"),
            *(
                "--coordinator",
                "worker-0:29500",
                "--stall-timeout",
                "60",
                "--grace",
                "5",
            ),
            *("train.py", "--lr", "a 'b'"),
        ]


def test_addresses_of_ipv6(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hosts.write_text("2001:db8::10 slots=2\n2001:db8::7 slots=1\n")
    commands = _printed(capfd, "-H", hosts, "--dry-run", "train.py")
    assert [words[-2] for words in commands] == ["2001:db8::10", "2001:db8::7"]
    for words, layout in zip(commands, ("[2001:db8::10]:0,1", "[2001:db8::7]:0"), strict=True):
        inner = shlex.split(words[-1])
        assert inner[inner.index("--layout") + 1] == layout
        assert inner[inner.index("--coordinator") + 1] == "[2001:db8::10]:29500"
    [words] = _printed(capfd, "-H", hosts, "--num_nodes", 1, "--port", 7, "--dry-run", "train.py")
    assert "[2001:db8::10]:7" in shlex.split(words[-1])


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_machine_alone_needs_no_ssh(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", "")
    hosts.write_text(f"{name} slots=4\nworker-1 slots=4\n")
    names = ("COORDINATOR_ADDRESS", "COORDINATOR_BIND_ADDRESS", "NUM_PROCESSES", "LOCAL_DEVICE_IDS")
    source = f"print(*(os.environ['JAX_' + n] for n in {names}), os.environ['A'])\n"
    port = free_port()
    options = ("-H", hosts, "--include", f"{name}:1,3", "--port", port, "--export", "A=b")
    assert launch(*options, script(hosts.parent, source)) == 0
    address = f"127.0.0.1:{port}"
    wanted = [f"[{i}] {address} {address} 2 {device} b" for i, device in enumerate((1, 3))]
    assert sorted(capfd.readouterr().out.splitlines()) == wanted
    [words] = _printed(capfd, *options, "--one-process-per-node", "--dry-run", "train.py")
    assert words[0] == "env"
    assert {"JAX_NUM_PROCESSES=1", "JAX_LOCAL_DEVICE_IDS=1,3"} <= {*words}


@pytest.mark.parametrize(
    "options",
    [("--launcher", "ssh"), ("--ssh-command", "ssh"), ("--coordinator", "a:1"), ("--num_nodes", 2)],
)
def test_this_machine_is_reached_as_it_is_asked_for(
    hosts: Path, capfd: pytest.CaptureFixture[str], options: tuple[object, ...]
) -> None:
    text = "localhost slots=1\n"
    hosts.write_text(text + "worker-1 slots=1\n" if "--num_nodes" in options else text)
    for words in _printed(capfd, "-H", hosts, *options, "--dry-run", "train.py"):
        assert words[0] == "ssh"


def test_srun_starts_one_launcher_a_node(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = (
        "-H",
        hosts,
        "--num_gpus",
        2,
        "--launcher",
        "srun",
        "--launcher-args",
        "--account=me --mem=0",
    )
    [words] = _printed(
        capfd, *options, "--one-process-per-node", "--dry-run", "--module", "pkg.train", "x"
    )
    assert words[: words.index("env")] == [
        *(
            "srun",
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
            "--nodelist=worker-0,worker-1",
            "--cpu-bind=none",
        ),
        *("--kill-on-bad-exit=1", f"--chdir={hosts.parent}", "--account=me", "--mem=0"),
    ]
    assert words[words.index("--layout") :] == [
        *(
            "--layout",
            "worker-0:0,1@worker-1:0,1",
            "--node-rank",
            "@SLURMD_NODENAME",
            "--coordinator",
        ),
        *("worker-0:29500", "--processes-per-node", "1", "--module", "pkg.train", "x"),
    ]


def test_mpirun_starts_one_launcher_a_node(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = (
        "-H",
        hosts,
        "--launcher",
        "mpirun",
        "--launcher-args=--oversubscribe",
        "--coordinator",
        "10.0.0.1:5",
    )
    [words] = _printed(
        capfd, *options, "--exclude", "worker-0:1,2,3", "--dry-run", "--no-python", "./train"
    )
    assert words[:2] == ["mpirun", "--oversubscribe"]
    first, second = words[2 : words.index(":")], words[words.index(":") + 1 :]
    for rank, part in enumerate((first, second)):
        assert part[:7] == [
            "-np",
            "1",
            "-host",
            f"worker-{rank}",
            "-wdir",
            str(hosts.parent),
            "env",
        ]
        assert part[part.index("--layout") :] == [
            *("--layout", ("worker-0:0", "worker-1:0,1")[rank], "--node-rank", "0"),
            *("--first-process", str(rank), "--num-processes", "3"),
            *("--coordinator", "10.0.0.1:5"),
            *("--no-python", "./train"),
        ]


@pytest.mark.slow
def test_a_job_over_two_nodes_that_fails_once(
    hosts: Path, here: Path, stand_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = script(
        hosts.parent,
        PROGRAM + "if attempt == '0':\n    if me == 2: sys.exit(9)\n    time.sleep(300)\n",
    )
    options = (
        "-H",
        hosts,
        "--include",
        "worker-0:1,3@worker-1",
        "--ssh-command",
        stand_in,
        "--max-restarts",
        1,
    )
    address = f"127.0.0.1:{free_port()}"
    options = (
        *options,
        "--coordinator",
        address,
        "--log-dir",
        hosts.parent / "logs",
        "--kill-grace",
        2,
    )
    assert launch(*options, program, here) == 0
    out, err = capfd.readouterr()
    nodes, devices = (0, 0, 1, 1), ("1", "3", "0", "1")
    assert sorted(out.splitlines()) == sorted(
        f"[{i}] node worker-{nodes[i]} devices {devices[i]} attempt {attempt}"
        for i in range(4)
        for attempt in (0, 1)
    )
    assert "[launch worker-1] process 2 (pid " in err
    assert ") ended with exit code 9. Ending the other, in 2 s at most." in err
    assert "[launch] node worker-1 (pid " in err
    assert (
        "[launch worker-0] The launcher that started this node ends it. Ending all, in 2 s at most."
        in err
    )
    assert "[launch] Attempt 1 of 2 ended with exit code 9. Starting again." in err
    log = hosts.parent / "logs" / "process-3.log"
    assert (
        log.read_text() == "node worker-1 devices 1 attempt 0\nnode worker-1 devices 1 attempt 1\n"
    )


@pytest.mark.slow
def test_a_signal_reaches_the_processes_on_the_nodes(
    hosts: Path, here: Path, stand_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
def save(got, frame):
    time.sleep(0.2)
    print("saved at", signal.Signals(got).name)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
"""
    source += (
        PROGRAM + "if me == 1: os.kill(int(os.environ['OUTER']), signal.SIGTERM)\ntime.sleep(300)\n"
    )
    address = f"127.0.0.1:{free_port()}"
    options = ("-H", hosts, "--one-process-per-node", "--cpu-devices", 2, "--ssh-command", stand_in)
    options = (
        *options,
        "--coordinator",
        address,
        "--grace",
        20,
        "--export",
        f"OUTER={os.getpid()}",
    )
    assert launch(*options, script(hosts.parent, source), here) == 143
    out, err = capfd.readouterr()
    assert sorted(line for line in out.splitlines() if "saved" in line) == [
        f"[{i}] saved at SIGTERM" for i in range(2)
    ]
    assert "[launch] Got SIGTERM. Ending all, in 20 s at most." in err
    assert (
        err.count("The launcher that started this node ends it. Ending it, in 20 s at most.") == 2
    )


@pytest.mark.slow
def test_the_launcher_is_killed_and_its_nodes_end(hosts: Path, here: Path, stand_in: str) -> None:
    program = script(hosts.parent, PROGRAM + "time.sleep(300)\n")
    options = ("-H", hosts, "--num_gpus", 1, "--num_nodes", 1, "--ssh-command", stand_in)
    with start(*options, "--coordinator", f"127.0.0.1:{free_port()}", program, here) as launcher:
        wait_until(lambda: len(list(here.glob("ready-0-*"))) == 1)
        launcher.kill()


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        (
            b"{}\nstop 15 7.5\n",
            0,
            "The launcher that started this node ends it. Ending it, in 7.5 s at most.",
        ),
        (b"{}\n", 143, "The launcher that started this node is gone. Ending it, in 5 s at most."),
    ],
    ids=["told", "gone"],
)
def test_a_node_listens_to_its_standard_input(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    said: bytes,
    code: int,
    reason: str,
) -> None:
    read, write = os.pipe()
    os.write(write, said)
    os.close(write)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        options = (
            "--layout",
            "a:0",
            "--coordinator",
            f"127.0.0.1:{free_port()}",
            "--control",
            "stdin",
        )
        assert launch("--node-rank", 0, *options, "--no-python", "sleep", 300) == code
    assert f"[launch a] {reason}" in capfd.readouterr().err


NASTY = "a 'b' \"c\" $d\nsecond line \u00e9 \\ \udcff"


def test_what_is_exported_stands_on_no_command_line(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of a machine see command lines, as ps shows them."""
    monkeypatch.setenv("SECRET", NASTY)
    monkeypatch.setenv("JAX_SHOWN", "shown")
    stand_in = hosts.parent / "ssh"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> lines\nshift; exec sh -c "$*"\n')
    stand_in.chmod(0o755)
    source = (
        "print(ascii(os.environ['SECRET']), os.environ['JAX_SHOWN'], open('/proc/%d/cmdline' % "
        "os.getppid()).read())"
    )
    options = (
        "-H",
        hosts,
        "--num_nodes",
        1,
        "--num_gpus",
        1,
        "--ssh-command",
        stand_in,
        "--export",
        "SECRET",
    )
    address = f"127.0.0.1:{free_port()}"
    assert (
        launch(
            *options,
            "--coordinator",
            address,
            "--export",
            "JAX_SHOWN=other",
            script(hosts.parent, source),
        )
        == 0
    )
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith(f"[0] {ascii(NASTY)} other ")
    assert "second line" not in line.partition(" other ")[2]
    lines = (hosts.parent / "lines").read_text()
    assert "JAX_SHOWN=other" in lines
    assert "SECRET" not in lines


def test_what_is_exported_may_be_longer_than_a_pipe(
    hosts: Path, stand_in: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program = script(hosts.parent, "print(len(os.environ['A']))\n")
    options = ("-H", hosts, "--num_nodes", 1, "--num_gpus", 1, "--ssh-command", stand_in)
    assert launch(*options, "--export", f"A={'x' * 100_000}", program) == 0
    assert "100000" in capfd.readouterr().out


def test_commands_of_many_nodes_grow_with_their_number(
    hosts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each node is sent its own place, not that of all."""

    def longest(count: int) -> int:
        hosts.write_text("".join(f"worker-{i:05} slots=8\n" for i in range(count)))
        commands = _printed(capfd, "-H", hosts, "--dry-run", "train.py")
        assert len(commands) == count
        return max(len(words[-1]) for words in commands)

    assert longest(2000) <= longest(2) + 10


def test_a_node_whose_launcher_is_gone_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(os.devnull).open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        options = (
            "--layout",
            "a:0",
            "--coordinator",
            f"127.0.0.1:{free_port()}",
            "--control",
            "stdin",
        )
        assert launch("--node-rank", 0, *options, "--no-python", "true") == 2
    assert (
        "must send its variables, but got none: it is gone, or standard input is closed."
        in capfd.readouterr().err
    )


def test_a_node_is_told_by_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    options = (
        "--layout",
        "a:0",
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        "--control",
        "signal",
    )
    assert (
        launch("--node-rank", 0, *options, "--no-python", "sh", "-c", "kill -USR1 $PPID; sleep 300")
        == 0
    )
    assert "[launch a] Got SIGUSR1. Ending it, in 30 s at most." in capfd.readouterr().err


def test_mpirun_gets_a_signal_that_it_passes_on(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = hosts.parent / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\ntrap "echo passed on; exit 0" USR1\necho "$SECRET: $*"\nkill -TERM $PPID\n'
        "while :; do sleep 0.1; done\n"
    )
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hosts.parent}:{os.environ['PATH']}")
    assert (
        launch("-H", hosts, "--launcher", "mpirun", "--export", "SECRET=hidden", "train.py") == 143
    )
    out = capfd.readouterr().out
    assert out.endswith("passed on\n")
    assert out.startswith("hidden: -np 1 -host worker-0 -wdir ")
    assert out.count(" -x SECRET ") == 2
    assert out.count("hidden") == 1


def test_a_node_that_cannot_be_reached(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    unreachable = "sh -c 'echo cannot reach $0 >&2; exit 255'"
    assert launch("-H", hosts, "--num_nodes", 1, "--ssh-command", unreachable, "train.py") == 255
    err = capfd.readouterr().err
    assert "cannot reach worker-0" in err
    assert "[launch] node worker-0 (pid " in err
    assert ") ended with exit code 255." in err


def test_being_a_node(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "print(*(os.environ.get('JAX_' + n) for n in ('COORDINATOR_ADDRESS', "
        "'COORDINATOR_BIND_ADDRESS',"
    )
    program = script(tmp_path, source + "'NUM_PROCESSES', 'PROCESS_ID', 'LOCAL_DEVICE_IDS')))\n")
    monkeypatch.setenv("RANK_HERE", "1")
    monkeypatch.setenv("NAME_HERE", "b")
    address = f"10.0.0.1:{free_port()}"
    counted = ("--num_nodes", 2, "--num_gpus", 4, "--processes-per-node", 2)
    assert launch("--node-rank", "@RANK_HERE", *counted, "--coordinator", address, program) == 0
    expected = [f"[2] {address} None 4 2 0,1", f"[3] {address} None 4 3 2,3"]
    assert sorted(capfd.readouterr().out.splitlines()) == expected
    listed = ("--layout", "a:0@b:2,5", "--processes-per-node", 1)
    assert launch("--node-rank", "@NAME_HERE", *listed, "--coordinator", address, program) == 0
    assert capfd.readouterr().out == f"[1] {address} None 2 1 2,5\n"


LONG = "9" * 5000
WRONG: list[tuple[str, str]] = [
    (
        "--node-rank 0 --layout a:0",
        "but got no --coordinator. Give every node the same, --coordinator HOST",
    ),
    ("--node-rank 0 --coordinator a", "--coordinator must be host:port, but got 'a'."),
    (
        "--node-rank 0 --coordinator a:1",
        "but got --layout None, --num_nodes None, --num_gpus None. Give all",
    ),
    ("--node-rank 0 --coordinator a:1 --num_nodes 2", "--num_nodes 2, --num_gpus None. Give all"),
    (
        "--node-rank 0 --coordinator a:1 --num_nodes 2 --num_gpus 1 --layout a:1",
        "either --layout or both --num_nodes and --num_gpus, but got --layout a:1, --num_nodes 2, "
        "--num_gpus 1.",
    ),
    (
        "--node-rank @NOT_SET --coordinator a:1 --layout a:0",
        "--node-rank @NOT_SET must name a variable of the environment, but NOT_SET is not set. "
        "Start it where",
    ),
    (
        "--node-rank @SHELL_NAME --coordinator a:1 --layout a:0",
        "SHELL_NAME, which --node-rank names, must be a number in [0, 1) or the name of a node, "
        "but got 'zsh'.",
    ),
    (
        "--hostfile hosts --port 1 --coordinator a:2",
        "but got --port 1 and --coordinator a:2. Leave",
    ),
    (
        "--hostfile hosts --ssh-command 'b",
        "--ssh-command must be words as a shell takes them, but got",
    ),
    ("--hostfile hosts --coordinator a:b", "--coordinator must be host:port, but got 'a:b'."),
    (
        "--hostfile hosts --processes-per-node 3",
        "but got 3 and worker-0 has slots=4. Use 2, or other slots.",
    ),
    (
        "--hostfile hosts --include worker-7",
        "but got 'worker-7' in --include 'worker-7'. It has worker-0",
    ),
    (f"--hostfile hosts --coordinator a:{LONG}", "--coordinator must be host:port, but got 'a:9"),
    (
        f"--node-rank {LONG} --coordinator a:1 --layout a:0",
        "--node-rank must be a number in [0, 1) or the name of a node, but got '9999",
    ),
    ("--hostfile gone", "--hostfile must be a text file that can be read, but got gone: "),
]


def test_wrong_use(
    hosts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL_NAME", "zsh")
    (hosts.parent / "train.py").touch()
    for words, message in WRONG:
        assert launch(*words.split(), "train.py") == 2, words
        assert message in capfd.readouterr().err


def test_the_coordinators_port_is_in_use(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (hosts.parent / "train.py").touch()
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        options = ("--node-rank", 0, "--layout", "a:0", "--coordinator", f"a:{port}")
        assert launch(*options, "train.py") == 2
    assert (
        f"--coordinator must be a free port of this machine, but got port {port}, which"
        in capfd.readouterr().err
    )
