"""What users see changes only together with the files of this folder.

`WRITE_SURFACE=1 pytest tests/surface` writes them.
"""

import os
from pathlib import Path

import pytest
from _collect import KINDS, collected


@pytest.mark.parametrize("kind", [*KINDS][:-1] + [pytest.param("arrays", marks=pytest.mark.slow)])
def test_the_surface_is_as_recorded(kind: str) -> None:
    recorded = Path(__file__).with_name(f"{kind}.txt")
    if "WRITE_SURFACE" in os.environ:
        recorded.write_text("".join(f"{line}\n" for line in collected(kind)))
    before, now = recorded.read_text().splitlines(), collected(kind)
    assert sorted({*before} - {*now}) == [], "gone"
    assert sorted({*now} - {*before}) == [], "new"
