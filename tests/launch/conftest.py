"""Notes that started processes leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _launching import is_running, wait_until


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A folder of notes; afterwards, no process that left one is running."""
    folder = tmp_path / "notes"
    folder.mkdir()
    yield folder
    pids = [int(path.name.partition("-")[2]) for path in folder.glob("pid-*")]
    assert pids
    wait_until(lambda: not any(map(is_running, pids)))
