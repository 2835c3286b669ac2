"""A launcher whose output nobody reads: a terminal that Ctrl-S stopped, a pager that waits."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from _covering import sweep
from _launching import PATIENCE_S, script, start, wait_until

# Prints until told to end, which it notices between two lines, as a training loop does between two
# steps.
PROGRAM = """
here, me, ended = Path(sys.argv[1]), int(os.environ["JAX_PROCESS_ID"]), []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: ended.append(1))
(here / f"pid-{os.getpid()}").write_text(str(me))
n = 0
while not ended:
    print(n, "x" * 1000)
    n += 1
    (here / f"printed-{me}").write_text(str(n))
print("y" * 300000)
(here / f"saved-{me}").touch()
"""


def _printed(here: Path) -> list[str]:
    return [path.read_text() for path in sorted(here.glob("printed-*"))]


def _wait_until_blocked(here: Path) -> None:
    """Until both processes have waited for a second to write a line."""
    seen: list[list[str]] = []

    def is_blocked() -> bool:
        seen.append(_printed(here))
        return (
            len(seen) > 50 and len(seen[-1]) == 2 and "" not in seen[-1] and seen[-1] == seen[-50]
        )

    wait_until(is_blocked)


@pytest.mark.soak
@pytest.mark.parametrize("how", sweep(1, ["TERM", "death", "INT", "HUP"]))
def test_nobody_reads_and_the_job_ends(here: Path, how: str) -> None:
    program = script(here.parent, PROGRAM)
    with start(
        "--nproc", 2, program, here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as launcher:
        try:
            _wait_until_blocked(here)
            if how == "death":
                [victim] = [path for path in here.glob("pid-*") if path.read_text() == "1"]
                os.kill(int(victim.name.partition("-")[2]), signal.SIGKILL)
            else:
                launcher.send_signal(signal.Signals[f"SIG{how}"])
            code = launcher.wait(PATIENCE_S)
        finally:
            launcher.kill()
    assert code == {"TERM": 143, "INT": 130, "HUP": 143, "death": 137}[how]
    saved = sorted(path.name for path in here.glob("saved-*"))
    assert saved == (["saved-0"] if how == "death" else ["saved-0", "saved-1"])


@pytest.mark.slow
def test_a_reader_who_comes_late_gets_all(tmp_path: Path) -> None:
    """Processes wait for their reader, and the launcher too when they have ended.

    Nothing is lost.
    """
    program = script(
        tmp_path, "for n in range(20000): print(n, 'x' * 200)\nPath(sys.argv[1]).touch()\n"
    )
    with start("--nproc", 2, program, tmp_path / "done", stdout=subprocess.PIPE) as launcher:
        time.sleep(3)
        out = launcher.communicate(timeout=PATIENCE_S)[0].decode().splitlines()
        assert launcher.returncode == 0
    for i in range(2):
        assert [line for line in out if line.startswith(f"[{i}] ")] == [
            f"[{i}] {n} {'x' * 200}" for n in range(20000)
        ]


@pytest.mark.slow
def test_a_reader_who_comes_after_the_end_gets_all(tmp_path: Path) -> None:
    program = script(
        tmp_path, "for n in range(2000): print(n, 'x' * 200)\nPath(sys.argv[1]).touch()\n"
    )
    with start("--nproc", 1, program, tmp_path / "done", stdout=subprocess.PIPE) as launcher:
        wait_until((tmp_path / "done").exists)
        time.sleep(3)  # longer than the launcher waits for pipes that stay open
        out = launcher.communicate(timeout=PATIENCE_S)[0].decode().splitlines()
    assert out == [f"[0] {n} {'x' * 200}" for n in range(2000)]


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_reader(tmp_path: Path) -> None:
    program = script(tmp_path, "print('x' * 400000)\nPath(sys.argv[1]).touch()\n")
    with start("--nproc", 1, program, tmp_path / "done", stdout=subprocess.PIPE) as launcher:
        try:
            wait_until((tmp_path / "done").exists)
            time.sleep(1)
            assert launcher.poll() is None
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(PATIENCE_S) in (0, 143)
        finally:
            launcher.kill()
