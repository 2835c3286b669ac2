"""A change of structure leaves the lowered steps as they are.

`WRITE_SURFACE=1 pytest -n 0 -m soak tests/surface` records them, for the versions installed.
"""

import json
import os
from importlib import metadata
from pathlib import Path

import pytest
from _fingerprints import cases, fingerprint, jobs

RECORD = Path(__file__).with_name("fingerprints.json")
PARTS = 8
VERSIONS = {name: metadata.version(name) for name in ("jax", "flax", "optax")}


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_lowered_steps_are_as_recorded(part: int) -> None:
    recorded = json.loads(RECORD.read_text())
    is_writing = "WRITE_SURFACE" in os.environ
    if not is_writing and recorded["versions"] != VERSIONS:
        pytest.skip(f"recorded with {recorded['versions']}")
    builds = sorted({**dict(cases()), **dict(jobs())}.items())[part::PARTS]
    found = {name: fingerprint(build()) for name, build in builds}
    if is_writing:
        recorded = {"versions": VERSIONS, "steps": {**recorded["steps"], **found}}
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    assert {name for name, each in found.items() if recorded["steps"].get(name) != each} == set()
