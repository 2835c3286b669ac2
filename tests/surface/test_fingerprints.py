"""A change of structure leaves the lowered steps as they are.

`WRITE_SURFACE=1 pytest -n 0 -m slow tests/surface` records them, for one version of JAX.
"""

import json
import os
from pathlib import Path

import jax
import pytest
from _fingerprints import cases, fingerprint, jobs

RECORD = Path(__file__).with_name("fingerprints.json")
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_lowered_steps_are_as_recorded(part: int) -> None:
    recorded = json.loads(RECORD.read_text())
    is_writing = "WRITE_SURFACE" in os.environ
    if not is_writing and recorded["jax"] != jax.__version__:
        pytest.skip(f"recorded with JAX {recorded['jax']}")
    builds = sorted({**dict(cases()), **dict(jobs())}.items())[part::PARTS]
    found = {name: fingerprint(build()) for name, build in builds}
    if is_writing:
        recorded = {"jax": jax.__version__, "steps": {**recorded["steps"], **found}}
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    assert {name for name, each in found.items() if recorded["steps"].get(name) != each} == set()
