"""The notebooks of the documentation run, and show what they are there to show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxpipe

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"

# In a process of its own, as a user's: its kernel warns of things that are errors here.
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def outputs_of(name: str, tmp_path: Path) -> list[dict[str, Any]]:
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
        # No settings of the person who runs it.
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "jupyter"),
    }
    written = tmp_path / name
    command = [sys.executable, "-c", RUN, str(NOTEBOOKS / name), str(written)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cells = json.loads(written.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


# The build of the documentation runs it too, and fails where it does.
@pytest.mark.soak
def test_first_look(tmp_path: Path) -> None:
    outputs = outputs_of("first_look.ipynb", tmp_path)
    shown = [output["data"] for output in outputs if "data" in output]
    engine, plan = ("".join(data["text/html"]) for data in shown if "text/html" in data)
    assert "PipelineEngine" in engine
    assert "<table" in engine
    assert "<svg" in engine
    assert "H100" in plan.upper()
    assert "zero-bubble" in plan
    assert any("image/svg+xml" in data for data in shown)
    assert any("image/png" in data for data in shown)
    printed = "".join(
        "".join(output["text"]) for output in outputs if output.get("name") == "stdout"
    )
    first, last = (
        float(part.split()[-1]) for part in printed.split("first step")[1].split("\n")[0].split(",")
    )
    assert last < first / 2
    pipelined, alone = printed.split("pipelined ")[1].split(", on one device ")
    assert float(pipelined) == pytest.approx(float(alone), abs=2e-6)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_no_outputs_are_stored(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
