"""Ten steps in one process, or five and five in two: equal to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _layouts import Layout
from _resume import LAYOUTS

SCRIPT = Path(__file__).with_name("_resume.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for phase in ("first", "second"):
        done = subprocess.run(
            [sys.executable, SCRIPT, phase, root],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return root


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equal_to_the_bit(layout: Layout, root: Path) -> None:
    folder = root / str(layout)
    first, second = (
        json.loads((folder / f"{phase}.json").read_text()) for phase in ("first", "second")
    )
    assert second == first
    assert first["counts"][:2] == [10, 80]
    with np.load(folder / "first.npz") as wanted, np.load(folder / "second.npz") as actual:
        assert sorted(actual) == sorted(wanted)
        assert any(key.startswith("opt_state/") for key in wanted)
        for key in wanted:
            np.testing.assert_array_equal(actual[key], wanted[key], err_msg=key)


@pytest.mark.slow
def test_the_loss_scale_moved(root: Path) -> None:
    """Steps were skipped before the checkpoint or after it, or the scale was doubled."""
    _, _, skipped, scale, _ = json.loads((root / str(LAYOUTS[2]) / "first.json").read_text())[
        "counts"
    ]
    assert skipped > 0
    assert scale != 2.0**24
