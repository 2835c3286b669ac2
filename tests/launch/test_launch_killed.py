"""The launcher is killed at any moment of its start: no process of its job is left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from _launching import PATIENCE_S, ROOT, is_running, wait_until

# Forks launchers that are up at once, and kills each after a while drawn at random; the last when
# its job runs.
ATTACK = """
import os, random, signal, sys, time
from jaxpipe.__main__ import main
tries, here, draw = int(sys.argv[1]), sys.argv[2], random.Random(0)
for left in reversed(range(tries)):
    pid = os.fork()
    if not pid:
        program = ["sh", "-c", f": > {here}/$$; exec sleep 300"]
        os._exit(main(["launch", "--nproc", "3", "--no-python", *program]))
    time.sleep(draw.uniform(0, draw.choice((0.05, 0.3))))
    while not left and not os.listdir(here):
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("tries", [8, pytest.param(200, marks=pytest.mark.soak)])
def test_no_orphans(tmp_path: Path, tries: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", ATTACK, str(tries), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S + tries)

    def running() -> list[Path]:
        return [path for path in tmp_path.iterdir() if is_running(int(path.name))]

    wait_until(lambda: not running())
