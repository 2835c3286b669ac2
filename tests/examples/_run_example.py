"""Run an example as its user would, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import jaxpipe

_EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str, status: int = 0) -> str:
    """What the example prints, or its error output where it is expected to end with another status."""
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(_EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stdout or done.stderr
