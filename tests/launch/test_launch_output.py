import os
import subprocess
import sys
from pathlib import Path

import pytest
from _launching import launch, script, start

from jaxpipe.launch._output import Output

MANY = """
i = os.environ["JAX_PROCESS_ID"]
for n in range(2000):
    os.write(1 + n % 2, f"{i} {n} {'x' * (n % 300)} end".encode() + b"\\n")
"""


def _copied(
    chunks: list[bytes], label: str, capfd: pytest.CaptureFixture[str], log_dir: Path | None = None
) -> str:
    """What comes out when a process writes these."""
    pipes = [os.pipe(), os.pipe()]
    readers = [os.fdopen(read, "rb", buffering=0) for read, _ in pipes]
    with Output(log_dir) as output:
        output.add(*readers, label, "process-0.log")
        output.start()
        for chunk in chunks:
            os.write(pipes[0][1], chunk)
        for _, write in pipes:
            os.close(write)
        output.close()
        output.drain(bool)
    return capfd.readouterr().out


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], "[3] one\n[3] two\n"),
        ([b"on", b"e\ntw", b"o\n"], "[3] one\n[3] two\n"),
        ([b"last without an end"], "[3] last without an end\n"),
        ([b"a\n\n\nb\n"], "[3] a\n[3] \n[3] \n[3] b\n"),
        ([b"a\r\nb\r", b"\nc\r\n"], "[3] a\n[3] b\n[3] c\n"),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], "[3]  10%\n[3]  20%\n[3] 100%\n"),
        ([b"\xff\xc3", b"\xa9\n"], "[3] \ufffd\u00e9\n"),
        ([b"x" * 40000] * 30, "[3] " + "x" * 1200000 + "\n"),
    ],
    ids=["lines", "pieces", "no-end", "empty", "crlf", "progress", "bytes", "long"],
)
def test_lines(chunks: list[bytes], lines: str, capfd: pytest.CaptureFixture[str]) -> None:
    copied = _copied(chunks, "3", capfd)
    if len(lines) > 1 << 20:  # a line too long to wait for is passed on in parts
        assert copied.count("[3] ") == 2
        copied, lines = copied.replace("[3] ", "").replace("\n", ""), lines[4:-1]
    assert copied == lines


def test_no_label_no_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    assert _copied([b"as it is\n"], "", capfd) == "as it is\n"


def test_lines_of_processes_are_never_mixed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch("--nproc", 3, "--log-dir", tmp_path / "logs", script(tmp_path, MANY)) == 0
    out, err = capfd.readouterr()
    expected = [f"{n} {'x' * (n % 300)} end" for n in range(2000)]
    for i in range(3):
        for text, first in ((out, 0), (err, 1)):
            mine = [line for line in text.splitlines() if line.startswith(f"[{i}] ")]
            assert mine == [f"[{i}] {i} {line}" for line in expected[first::2]]
        log = (tmp_path / "logs" / f"process-{i}.log").read_text().splitlines()
        assert sorted(log) == sorted(f"{i} {line}" for line in expected)
    assert len(out.splitlines()) == len(err.splitlines()) == 3000


def test_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        program = script(tmp_path, "os.write(1, b'x' * 1000000)\nPath(sys.argv[1]).touch()\n")
        assert launch("--nproc", 1, program, tmp_path / "finished") == 0
    assert (tmp_path / "finished").exists()


def test_streams_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--nproc", 1, script(tmp_path, "print('caf\\u00e9')")) == 0
    assert capsys.readouterr().out == "[0] caf\u00e9\n"


def test_a_full_disk_under_the_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the processes print still comes through.

    The launcher says what the files lack, once.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "process-1.log").symlink_to("/dev/full")
    program = script(tmp_path, "for n in range(50):\n    print(n)\n    time.sleep(0.002)\n")
    assert launch("--nproc", 2, "--log-dir", logs, program) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(f"[{i}] {n}" for n in range(50) for i in range(2))
    assert err == (
        f"[launch] {logs}/process-1.log cannot be written: No space left on device. It lacks lines "
        "from here on.\n"
    )
    assert (logs / "process-0.log").read_text() == "".join(f"{n}\n" for n in range(50))


def test_a_full_disk_under_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert launch("--nproc", 1, script(tmp_path, "print('x' * 1000)")) == 0
        monkeypatch.undo()
    wanted = "[launch] The launcher's standard output lacks 1005 bytes: No space left on device.\n"
    assert capfd.readouterr().err == wanted


def test_a_log_folder_that_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    program = script(tmp_path, "")
    assert launch("--nproc", 1, "--log-dir", tmp_path / "file", program) == 2
    assert launch("--nproc", 1, "--log-dir", tmp_path / "file" / "logs", program) == 2
    first, second = capfd.readouterr().err.splitlines()
    wanted = "--log-dir must be a folder that can be made, but got"
    assert first.endswith(f"{wanted} {tmp_path}/file: File exists. Give the path of another.")
    assert second.endswith(
        f"{wanted} {tmp_path}/file/logs: Not a directory. Give the path of another."
    )


def test_no_output_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `>&- 2>&-` in a shell."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    program = script(tmp_path, "print('x' * 1000000)\nPath(sys.argv[1]).touch()\nsys.exit(3)\n")
    assert launch("--nproc", 1, program, tmp_path / "finished") == 3
    assert (tmp_path / "finished").exists()


@pytest.mark.slow
def test_much_at_once(tmp_path: Path) -> None:
    """100 MB of bytes that are no text, in lines of all lengths.

    They go through a pipe that is read slowly at first.
    """
    source = "line = bytes(range(256)).replace(b'\\n', b'').replace(b'\\r', b'') * 39\n"
    program = script(
        tmp_path, source + "for n in range(10000): os.write(1, b'%d ' % n + line[n:] + b'\\n')\n"
    )
    line = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"") * 39
    with start("--nproc", 2, program, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        found: dict[bytes, int] = {}
        for text in launcher.stdout:
            label, number, rest = (
                text.split(b" ", 2) if text.count(b" ") > 1 else (*text.split(b" ", 1), b"\n")
            )
            n = found.get(label, 0)
            assert (int(number), rest) == (n, line[n:] + b"\n")
            found[label] = n + 1
    assert launcher.returncode == 0
    assert found == {b"[0]": 10000, b"[1]": 10000}
