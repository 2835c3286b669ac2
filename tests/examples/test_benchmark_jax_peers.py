import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_pipelines_train_alike() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.jax_peers", "--smoke"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Title and rule, then jaxpipe and four forms, with and without recompute; the benchmark
    # compares the losses.
    assert len(done.stdout.splitlines()) == 2 + 10
