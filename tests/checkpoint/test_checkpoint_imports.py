"""What is imported only when a checkpoint is written or read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe

PROGRAM = """
import logging, sys
import jaxpipe, jaxpipe.checkpoint
assert not [name for name in sys.modules if name.partition(".")[0] == "orbax"]
assert logging.root.handlers == []
import jax.numpy as jnp
from pathlib import Path
from jaxpipe.checkpoint._store import finish_arrays, write_arrays
arrays = {"x": jnp.ones(3)}
finish_arrays(Path(sys.argv[1]), arrays, write_arrays(Path(sys.argv[1]), arrays))
assert "orbax.checkpoint" in sys.modules
"""


@pytest.mark.slow
def test_orbax_waits_for_the_first_checkpoint(tmp_path: Path) -> None:
    """Its import takes longer than the library's own, and gives the root logger a handler."""
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "arrays")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
