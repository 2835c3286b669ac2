"""What people read about a checkpoint."""

import re
from pathlib import Path
from typing import Any

import pytest
from _saved import change_index, copied, saved, trained

from jaxpipe.checkpoint import inspect_checkpoint
from jaxpipe.errors import CheckpointError

SAME = "float32[2, 32] -> float32[2, 32]"
LAYERS = [
    ("0", "3 layers", "3,168", "8.2 KiB"),
    ("0_Dense", "1,056", "4.1 KiB", SAME, "float32: tied/io/bias [32], tied/io/kernel [32, 32]"),
    ("1_Dense .. 2_Dense", "2,112", "4.1 KiB", SAME, "bfloat16: bias [32], kernel [32, 32]"),
    ("1", "3 layers", "2,112", "6.2 KiB"),
    ("3_Half", "1,056", "2.1 KiB", SAME, "float16: Dense_0/bias [32], Dense_0/kernel [32, 32]"),
    ("4_tanh", "0", "0 B", SAME),
    ("5_Dense", "1,056", "4.1 KiB", SAME, "float32: tied/io/bias [32], tied/io/kernel [32, 32]"),
]
TOTALS = r"""
in all                        elements  arrays +size
parameters, shared ones once     4,224       8 +10\.3 KiB
beside the parameters                1       1 +4 B
state of the optimiser           8,454      22 +20\.6 KiB
on disk, in \d+ files +14 +\d+\.\d KiB"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inspect")


def facts(text: str) -> dict[str, str]:
    """The first block, by the words at its left."""
    lines = text.split("\n\n")[0].splitlines()
    return {name: value for name, value in (re.split(r"  +", line, maxsplit=1) for line in lines)}


def test_the_report(root: Path) -> None:
    text = inspect_checkpoint(saved(root))
    found = facts(text)
    moment, versions = found.pop("saved"), found.pop("written with")
    assert found == {
        "checkpoint": str(root / "saved" / "global_step1"),
        "tag": "global_step1",
        "trained": "1 step, 8 samples",
        "topology": "2 stages x 2 replicas, ZeRO stage 1",
        "also holds": "client state (epoch)",
        "beside it": "no other checkpoint",
    }
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", moment)
    assert re.match(r"python 3\.\d+\.\d+, .*jax \d+\.\d+", versions)
    table = [tuple(re.split("  +", line.strip())) for line in text.split("\n\n")[1].splitlines()]
    assert table[0][:4] == ("stage", "layers", "parameters", "size")
    assert table[1:] == LAYERS
    assert re.search(TOTALS, text)
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_other_checkpoints_are_listed(tmp_path: Path) -> None:
    for tag, save_latest in (("first", True), ("second", True), ("aside", False)):
        trained().save_checkpoint(tmp_path, tag, save_latest=save_latest)
    found = facts(inspect_checkpoint(tmp_path))
    assert (found["tag"], found["beside it"]) == ("second", "first (1 step), aside (1 step)")
    assert (
        facts(inspect_checkpoint(tmp_path, "aside"))["tag"]
        == "aside (saved with save_latest=False)"
    )
    (tmp_path / "first" / "commit.json").write_text("{}")
    assert (
        "commit.json must be a commit" in facts(inspect_checkpoint(tmp_path, "second"))["beside it"]
    )


def test_what_only_some_runs_have(root: Path, tmp_path: Path) -> None:
    def other_run(index: dict[str, Any]) -> None:
        index |= {
            "data_iterators": [{"state": 3, "is_own": True}, None],
            "client_state": {},
            "global_steps": 12345,
        }
        index["mesh"] = {"stage": 1, "data": 2, "model": 4}
        index["scalars"] |= {"loss_scale": {"scale": 2.0**24, "hysteresis": 2}, "skipped_steps": 2}
        index["versions"] = {"python": "3.12.0", "jaxpipe": "not installed"}

    path = copied(root, tmp_path) / "global_step1"
    change_index(path, other_run)
    commit = (path / "commit.json").read_text()
    (path / "commit.json").write_text(re.sub(r'("saved_at": ").*"', r'\1some day"', commit))
    found = facts(inspect_checkpoint(path))
    assert found["trained"] == "12,345 steps, 8 samples, 2 steps skipped"
    assert found["topology"] == "1 stage x 2 replicas x 4 model shards, ZeRO stage 1"
    assert (found["loss scale"], found["also holds"]) == (
        "16,777,216",
        "the place of 1 data iterator",
    )
    assert (found["written with"], found["saved"]) == ("python 3.12.0", "some day")


def test_there_must_be_a_checkpoint_to_inspect(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"and no checkpoint\. Pass the directory"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"got tag='best' .* 'global_step1'\. Use one of these tags"
    ):
        inspect_checkpoint(saved(root), "best")
