"""Reports of finished steps go on after one that could not be written or waited for."""

import os
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxpipe.distributed import HEARTBEAT_FILE, Heartbeat

PATIENCE_S = 30.0


def _wait_for_beat(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while file.stat().st_mtime == 0:
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    os.utime(file, (0, 0))


def test_a_step_that_cannot_be_reported_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "beat"
    file.touch()
    os.utime(file, (0, 0))
    monkeypatch.setenv(HEARTBEAT_FILE, str(file))
    heartbeat = Heartbeat()
    obstacle = tmp_path / "beat.part"
    obstacle.mkdir()  # as on a full file system, no text can be written
    heartbeat.note(jnp.ones(2), "step 1")
    _wait_for_beat(file)
    assert file.read_text() == ""
    donated = jnp.ones(2)
    donated.delete()
    heartbeat.note(donated, "step 2")
    obstacle.rmdir()
    heartbeat.note(jnp.ones(2), "step 3")
    _wait_for_beat(file)
    assert file.read_text() == "step 3"
    heartbeat.note(jnp.ones(2), "step 4 of caf\udce9")
    _wait_for_beat(file)
    assert file.read_text() == r"step 4 of caf\udce9"
    file.unlink()
    tmp_path.rename(tmp_path.with_name("gone"))
    heartbeat.touch("a save")
