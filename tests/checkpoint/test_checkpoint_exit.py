"""A program that ends while it saves in the background ends the save first.

It fails where the save failed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe
from jaxpipe.checkpoint import committed_tags, verify_checkpoint

SCRIPT = Path(__file__).parent / "_save_and_end.py"


def ended(path: Path, how: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(SCRIPT), str(path), how]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("returns", 0),
        pytest.param("exits", 3, marks=pytest.mark.soak),
        pytest.param("raises", 1, marks=pytest.mark.soak),
    ],
)
def test_the_last_checkpoint_is_there(tmp_path: Path, how: str, code: int) -> None:
    done = ended(tmp_path, how)
    assert done.returncode == code, done.stderr[-4000:]
    assert list(committed_tags(tmp_path)) == ["global_step1"]
    assert verify_checkpoint(tmp_path).tag == "global_step1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step1", "latest"]
    assert done.stdout.splitlines()[-1] == "at the end"


@pytest.mark.slow
def test_a_checkpoint_that_could_not_be_written_fails_the_program(tmp_path: Path) -> None:
    """What else the program does at its end is done."""
    done = ended(tmp_path, "fails")
    assert done.returncode == 120
    assert committed_tags(tmp_path) == {}
    (told,) = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("jaxpipe.errors.CheckpointError: ")
    ][-1:]
    assert f"{tmp_path}/global_step1 could not be written: " in told
    assert told.endswith("Make room or check the file system, and save again.")
    assert done.stdout.splitlines()[-1] == "at the end"


@pytest.mark.slow
def test_an_interrupted_wait_for_the_last_checkpoint_fails_the_program(tmp_path: Path) -> None:
    done = ended(tmp_path, "interrupted")
    assert done.returncode == 120, done.stderr[-4000:]
    assert committed_tags(tmp_path) == {}
    assert done.stderr.splitlines()[-1] == (
        "KeyboardInterrupt: the program was interrupted while a checkpoint was written in the "
        "background, which is lost"
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] == "at the end"
