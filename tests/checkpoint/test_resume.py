"""Ten steps in one process, or five and five in two: equal to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _resume import LAYOUTS

SCRIPT = Path(__file__).with_name("_resume.py")


def results(root: Path) -> None:
    """Let one process train on, and let another load what the first saved half-way."""
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


# One test: two processes train all layouts, which takes longer than to compare them.
@pytest.mark.soak
def test_all_layouts_are_equal_to_the_bit(tmp_path: Path) -> None:
    results(tmp_path)
    for layout in LAYOUTS:
        folder = tmp_path / str(layout)
        first, second = (
            json.loads((folder / f"{phase}.json").read_text()) for phase in ("first", "second")
        )
        assert second == first, layout
        assert first["counts"][:2] == [10, 80], layout
        with np.load(folder / "first.npz") as wanted, np.load(folder / "second.npz") as actual:
            assert sorted(actual) == sorted(wanted), layout
            assert any(key.startswith("opt_state/") for key in wanted), layout
            for key in wanted:
                message = f"{layout}: {key}"
                np.testing.assert_array_equal(actual[key], wanted[key], err_msg=message)
    # Steps were skipped before the checkpoint or after it, or the scale was doubled.
    counts = json.loads((tmp_path / str(LAYOUTS[2]) / "first.json").read_text())["counts"]
    _, _, skipped, scale, _ = counts
    assert skipped > 0
    assert scale != 2.0**24
