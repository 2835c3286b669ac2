"""Processes of a job die or stop.

The job ends soon, says so, and goes on from the last checkpoint as if it had not.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _job import environment

from jaxpipe.checkpoint import committed_tags

SCRIPT = Path(__file__).with_name("_train_and_resume.py")
STEPS = 8
GONE_S = 20.0
"""Within which all processes of a job must have ended after one of them died."""


@contextlib.contextmanager
def launched(
    folder: Path, *options: Any, kill_at: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("pid*"):
        path.unlink()
    script = [SCRIPT, folder, STEPS, *([] if kill_at is None else [kill_at])]
    command = [
        sys.executable,
        "-m",
        "jaxpipe.launch",
        "--nproc",
        2,
        "--cpu-devices",
        1,
        *options,
        *script,
    ]
    with subprocess.Popen(
        list(map(str, command)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("it did not come in time")


def losses(folder: Path) -> dict[int, str]:
    """The last loss of each step, as it was printed."""
    lines = (folder / "losses").read_text().splitlines() if (folder / "losses").exists() else []
    return {
        int(step): loss for step, loss in (line.split() for line in lines if line.count(" ") == 1)
    }


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid{i}").read_text()) for i in range(2)]


def ends(process: subprocess.Popen[str], running: list[int]) -> tuple[int, str]:
    """The launcher's exit code and output, once it and all its processes are gone."""
    start = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < GONE_S, output
    for pid in running:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return process.returncode, output


def resume(folder: Path, reference: dict[int, str]) -> None:
    """Going on to the end gives the same losses, to the last digit.

    It leaves whole checkpoints only.
    """
    with launched(folder) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert losses(folder) == reference
    assert list(committed_tags(folder / "saved"))[-1] == f"global_step{STEPS}"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Losses of a job that nothing happens to.

    It is killed by itself once, and restarted by the launcher.
    """
    folder = tmp_path_factory.mktemp("reference")
    with launched(folder) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    found = losses(folder)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def kill_in_a_step(folder: Path, victim: int, step: int, delay_s: float) -> tuple[int, str]:
    with launched(folder) as process:
        wait_for(lambda: step in losses(folder))
        running = pids(folder)
        time.sleep(delay_s)
        os.kill(running[victim], signal.SIGKILL)
        return ends(process, running)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_killed_in_a_step(victim: int, tmp_path: Path, reference: dict[int, str]) -> None:
    code, output = kill_in_a_step(tmp_path, victim, 3, 0.02)
    assert code == 128 + signal.SIGKILL, output
    resume(tmp_path, reference)


@pytest.mark.slow
def test_a_process_killed_in_a_save(tmp_path: Path, reference: dict[int, str]) -> None:
    with launched(tmp_path) as process:
        wait_for(lambda: 3 in losses(tmp_path))
        running = pids(tmp_path)
        wait_for(lambda: list(tmp_path.glob("saved/global_step*/data-*/writing-1")))
        os.kill(running[1], signal.SIGKILL)
        code, output = ends(process, running)
    assert code == 128 + signal.SIGKILL, output
    resume(tmp_path, reference)


@pytest.mark.slow
def test_the_launcher_restarts_by_itself(tmp_path: Path, reference: dict[int, str]) -> None:
    with launched(tmp_path, "--max-restarts", 1, kill_at=4 * 4 + 2) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert losses(tmp_path) == reference


@pytest.mark.slow
def test_a_stopped_process_is_found(tmp_path: Path) -> None:
    with launched(tmp_path, "--stall-timeout", 4) as process:
        wait_for(lambda: 2 in losses(tmp_path))
        running = pids(tmp_path)
        os.kill(running[1], signal.SIGSTOP)
        code, output = ends(process, running)
    assert code != 0
    assert "--stall-timeout 4" in output
    assert re.search(r"process 1 \(pid \d+\) .* its last, on stage 1 at global_steps=\d+,", output)
    assert "It is stopped by a signal." in output


RAISE = """
import sys
import jax, numpy as np
from jax.experimental import multihost_utils
import jaxpipe
jaxpipe.init_distributed()
for step in range(10000):
    if step == 3 and jax.process_index() == int(sys.argv[1]):
        raise ValueError("the error of one")
    multihost_utils.process_allgather(np.ones(3))
"""


@pytest.mark.parametrize(
    "who", [pytest.param(0, marks=pytest.mark.soak), pytest.param(1, marks=pytest.mark.slow)]
)
def test_one_that_raises_is_named(who: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RAISE)
    words = ["--nproc", "2", "--cpu-devices", "1", str(tmp_path / "program.py"), str(who)]
    command = [sys.executable, "-m", "jaxpipe.launch", *words]
    done = subprocess.run(
        command, env=environment(), stderr=subprocess.PIPE, text=True, check=False, timeout=240
    )
    assert done.returncode == 1, done.stderr
    assert f"[launch] process {who} (pid " in done.stderr
    assert f"[launch] process {1 - who} (pid " not in done.stderr
    assert done.stderr.endswith("[launch]     ValueError: the error of one\n")
    assert "Shutdown" not in done.stderr, "nobody waited for the others at the end"


@pytest.mark.soak
def test_twenty_random_kills(tmp_path: Path, reference: dict[int, str]) -> None:
    draw = random.Random(0)
    for i in range(20):
        folder = tmp_path / str(i)
        kill_in_a_step(
            folder, draw.randrange(2), draw.randrange(1, STEPS - 1), draw.uniform(0.0, 0.3)
        )
        resume(folder, reference)
