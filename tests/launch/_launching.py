"""Running the launcher in this process, on tiny programs that are processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxpipe.__main__ import main

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0


def launch(*words: object) -> int:
    """`jaxpipe launch ...`, here."""
    return main(["launch", *map(str, words)])


def script(folder: Path, source: str) -> Path:
    """A program in a file."""
    path = folder / "program.py"
    path.write_text("import os, signal, subprocess, sys, time\nfrom pathlib import Path\n" + source)
    return path


def start(*words: object, **options: object) -> "subprocess.Popen[bytes]":
    """The launcher as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxpipe.launch", *map(str, words)]
    return subprocess.Popen(command, env=environment, **options)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what must come true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
