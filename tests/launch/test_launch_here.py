"""`--nproc`: processes on this machine."""

import re
import socket
from pathlib import Path

import pytest
from _launching import launch, script

import jaxpipe
from jaxpipe.__main__ import main

SHOW = """
names = sys.argv[1].split(",")
for name in names:
    print(name, os.environ.get(name))
"""
PLACE = (
    "JAX_COORDINATOR_ADDRESS,JAX_COORDINATOR_BIND_ADDRESS,"
    "JAX_NUM_PROCESSES,JAX_PROCESS_ID,JAXPIPE_RESTART"
)
DEVICES = "JAX_LOCAL_DEVICE_IDS,JAX_PLATFORMS,JAX_NUM_CPU_DEVICES"


def _shown(capfd: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """What each process printed, by its label."""
    found: dict[str, dict[str, str]] = {}
    for line in capfd.readouterr().out.splitlines():
        label, name, value = line.split(" ", 2)
        found.setdefault(label, {})[name] = value
    return found


def test_each_process_knows_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--nproc", 3, script(tmp_path, SHOW), PLACE) == 0
    shown = _shown(capfd)
    assert sorted(shown) == ["[0]", "[1]", "[2]"]
    addresses = {values.pop("JAX_COORDINATOR_ADDRESS") for values in shown.values()}
    assert len(addresses) == 1
    assert addresses.pop().startswith("127.0.0.1:")
    for i in range(3):
        bind = shown[f"[{i}]"].pop("JAX_COORDINATOR_BIND_ADDRESS")
        assert bind.startswith("127.0.0.1:")
        assert shown[f"[{i}]"] == {
            "JAX_NUM_PROCESSES": "3",
            "JAX_PROCESS_ID": str(i),
            "JAXPIPE_RESTART": "0",
        }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--nproc", 1), [("None", "None", "None")]),
        (("--nproc", 2), [("0", "None", "None"), ("1", "None", "None")]),
        (
            ("--nproc", 2, "--devices-per-process", 2),
            [("0,1", "None", "None"), ("2,3", "None", "None")],
        ),
        (("--nproc", 1, "--devices-per-process", 2), [("0,1", "None", "None")]),
        (("--nproc", 2, "--cpu-devices", 4), [("None", "cpu", "4")] * 2),
    ],
    ids=["one", "two", "two-each", "one-with-two", "simulated"],
)
def test_devices(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    expected: list[tuple[str, ...]],
) -> None:
    for name in DEVICES.split(","):
        monkeypatch.delenv(name, raising=False)
    assert launch(*options, script(tmp_path, SHOW), DEVICES) == 0
    shown = _shown(capfd)
    assert [tuple(shown[f"[{i}]"].values()) for i in range(len(shown))] == expected


def test_gpus_of_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = script(tmp_path, SHOW)
    assert launch("--num_gpus", 300, program, "JAX_NUM_PROCESSES") == 2
    wanted = r"at most the number of this machine's GPUs, but got 300 and \d+ .* use --nproc 300"
    assert re.search(wanted, capfd.readouterr().err)
    assert launch("--num_gpus", 2, "--cpu-devices", 1, program, "JAX_NUM_PROCESSES") == 0
    assert {*_shown(capfd)} == {"[0]", "[1]"}
    assert launch("--num_gpus", 300, "--dry-run", program) == 0


def test_a_job_inside_a_job_has_its_own_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*PLACE.split(","), "JAXPIPE_HEARTBEAT_FILE"):
        monkeypatch.setenv(name, "7")
    assert launch("--nproc", 1, script(tmp_path, SHOW), f"{PLACE},JAXPIPE_HEARTBEAT_FILE") == 0
    shown = _shown(capfd)["[0]"]
    assert shown["JAX_NUM_PROCESSES"] == "1"
    assert shown["JAX_PROCESS_ID"] == "0"
    assert shown["JAXPIPE_RESTART"] == "7"  # a scheduler counts its own restarts
    assert shown["JAXPIPE_HEARTBEAT_FILE"] == "None"


def test_arguments_input_and_both_outputs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = script(
        tmp_path,
        "print(sys.argv[1:], repr(sys.stdin.read()))\nprint('to stderr', file=sys.stderr)\n",
    )
    assert launch("--nproc", 1, program, "--nproc", "9", "--", "a b", "-x") == 0
    out, err = capfd.readouterr()
    assert out == "[0] ['--nproc', '9', '--', 'a b', '-x'] ''\n"
    assert err == "[0] to stderr\n"


def test_modules_and_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("--nproc", 1, "--module", "platform", "--terse") == 0
    assert (
        launch(
            "--nproc", 1, "--no-python", "sh", "-c", "echo $JAX_PROCESS_ID of $JAX_NUM_PROCESSES"
        )
        == 0
    )
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1] == "[0] 0 of 1"
    assert len(lines) == 2


def test_exported_variables(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_HERE", "here")
    options = ("--export", "FROM_HERE", "--export", "NEW=a=b c")
    assert launch("--nproc", 1, *options, script(tmp_path, SHOW), "FROM_HERE,NEW") == 0
    assert _shown(capfd) == {"[0]": {"FROM_HERE": "here", "NEW": "a=b c"}}


def test_dry_run_prints_what_a_shell_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = script(tmp_path, SHOW)
    assert (
        launch("--nproc", 2, "--dry-run", "--export", "NEW=a 'b'", program, "JAX_PROCESS_ID,NEW")
        == 0
    )
    first, second = capfd.readouterr().out.splitlines()
    assert "JAX_PROCESS_ID=0" in first
    assert launch("--nproc", 1, "--no-python", "sh", "-c", second) == 0
    assert _shown(capfd) == {"[0]": {"JAX_PROCESS_ID": "1", "NEW": "a 'b'"}}


def test_a_given_port(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert launch("--nproc", 1, "--port", port, script(tmp_path, SHOW), PLACE) == 2
    err = capfd.readouterr().err
    assert (
        f"jaxpipe launch: --port must be a free port of this machine, but got port {port}, which "
        "is in use." in err
    )
    assert launch("--nproc", 1, "--port", port, script(tmp_path, SHOW), PLACE) == 0
    assert _shown(capfd)["[0]"]["JAX_COORDINATOR_ADDRESS"] == f"127.0.0.1:{port}"


WRONG: list[tuple[str, str]] = [
    ("train.py", "must be told .*, but got neither --nproc nor --hostfile. Write --nproc 2"),
    (
        "--nproc 1 gone.py",
        "the script must be a file, but got 'gone.py' in .*or write --module gone.py or "
        "--no-python gone.py",
    ),
    (
        "--nproc 1 --no-python gone",
        "process 0 must run a program that is there, but got 'gone', which is none. Install",
    ),
    ("--nproc 1 --include a x.py", "--include .* with --nproc, but got --include a. It"),
    ("--nproc 1 --num_gpus 2 x.py", "--num_gpus .* with --nproc, but got --num_gpus 2"),
    ("-H f --nproc 1 x.py", r"--nproc must .* with --hostfile, but got --nproc 1\."),
    ("--nproc 1 --export 1A=2 x.py", r"--export .* NAME=VALUE, but got --export '1A=2'\."),
    ("--nproc 1 --export NOT_SET x.py", r"Set it, or write --export NOT_SET=VALUE\."),
    (
        "--nproc 1 --cpu-devices 2 --devices-per-process 3 x.py",
        r"but got --cpu-devices 2 and --devices-per-process 3\. Leave one of them out\.",
    ),
]


def test_wrong_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    for words, message in WRONG:
        assert launch(*words.split()) == 2, words
        assert re.search(message, text := capfd.readouterr().err, re.DOTALL), text


NUMBERS: list[tuple[str, str, str]] = [
    ("--nproc", "0", "a whole number in [1, 65536], but got '0'. Write for instance 2."),
    ("--max-restarts", "-1", "must be a whole number of at least 0, but got '-1'."),
    ("--nproc", "9" * 5000, "must be a whole number in [1, 65536], but got '9999"),
    ("--nproc", "65537", "must be a whole number in [1, 65536], but got '65537'."),
    ("--max-restarts", "9" * 5000, "... (5000 characters). Write for instance 2."),
    ("--grace", "9" * 5000, "... (5000 characters). Write for instance 30."),
    ("--port", "65536", "must be a port in [1, 65535], but got '65536'."),
    ("--grace", "nan", "must be seconds, at least 0, but got 'nan'. Write for instance 30."),
    ("--stall-timeout", "soon", "must be seconds, at least 0, but got 'soon'."),
]


def test_wrong_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    for option, value, message in NUMBERS:
        with pytest.raises(SystemExit) as caught:
            launch("--nproc", "1", f"{option}={value}", "x.py")
        assert caught.value.code == 2
        assert option in (text := capfd.readouterr().err)
        assert message in text


def test_the_program_jaxpipe(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "jaxpipe launch [options] SCRIPT" in capfd.readouterr().out
    assert main(["lunch", "--nproc", "1"]) == 2
    err = capfd.readouterr().err
    assert "jaxpipe launch [options] SCRIPT" in err
    assert "'lunch' is not a command. Did you mean 'launch'?" in err
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"jaxpipe {jaxpipe.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        launch("--help")
    assert "--stall-timeout SECONDS" in capfd.readouterr().out


def test_the_room_exports_what_it_says() -> None:
    assert all(hasattr(jaxpipe.launch, name) for name in jaxpipe.launch.__all__)
