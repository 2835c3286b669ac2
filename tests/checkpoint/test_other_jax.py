"""A checkpoint opens on another version of JAX, and training goes on with the same losses.

`JAXPIPE_OTHER_PYTHON` names a Python with the packages that jaxpipe needs, in other versions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from _tolerances import ROUNDING, assert_loss

OTHER = os.environ.get("JAXPIPE_OTHER_PYTHON")
SCRIPT = Path(__file__).with_name("_with_a_jax.py")
# Not where jaxpipe is installed: the packages beside it are of one Python.
SOURCES = SCRIPT.parents[2]
pytestmark = pytest.mark.skipif(
    not OTHER, reason="needs JAXPIPE_OTHER_PYTHON, a Python with another JAX"
)


def losses(python: str, phase: str, root: Path) -> tuple[str, list[float]]:
    """The version of JAX, and the losses after the checkpoint."""
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)  # what one knows the other may abort over
    done = subprocess.run(
        [python, SCRIPT, phase, root], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    version, found = json.loads(done.stdout.splitlines()[-1])
    return version, found


@pytest.mark.parametrize("is_forth", [True, False], ids=["forth", "back"])
def test_saved_on_one_and_resumed_on_the_other(is_forth: bool, tmp_path: Path) -> None:
    pythons = (sys.executable, str(OTHER)) if is_forth else (str(OTHER), sys.executable)
    (saved, wanted), (resumed, found) = (
        losses(python, phase, tmp_path)
        for python, phase in zip(pythons, ("save", "resume"), strict=True)
    )
    assert saved != resumed
    assert_loss(found, wanted, tolerance=ROUNDING)
