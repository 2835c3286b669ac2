"""Reading everything: what is whole is counted, all that is damaged is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _saved import change_index, copied, files_with, flip, saved, trained

from jaxpipe.checkpoint import verify_checkpoint
from jaxpipe.core.state import state_arrays
from jaxpipe.errors import CheckpointError

KERNEL, MOMENTS = "params/stacked/tied/io/kernel", "opt_state/own/packed/float32"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


def test_a_whole_checkpoint_is_counted(root: Path) -> None:
    arrays = state_arrays(trained().state)
    found = verify_checkpoint(saved(root))
    assert (found.path, found.tag) == (root / "saved" / "global_step1", "global_step1")
    assert found.num_arrays == len(arrays)
    assert found.num_rows == sum(array.shape[0] for array in arrays.values())
    assert found.num_bytes == sum(array.nbytes for array in arrays.values())


def test_a_flipped_bit_is_found_in_each_array_that_has_one(root: Path, tmp_path: Path) -> None:
    arrays = {name: np.asarray(array) for name, array in state_arrays(trained().state).items()}
    path = copied(root, tmp_path)
    flip(path, arrays[KERNEL][1])
    flip(path, arrays[MOMENTS][0])
    named = (
        rf"got 2 damaged: {KERNEL} \(rows 1, 3\), {MOMENTS} \(rows 0, 2\)\. Load another tag, or "
        r"restore the files"
    )
    with pytest.raises(CheckpointError, match=named):
        verify_checkpoint(path, "global_step1")


def test_all_damaged_rows_of_an_array_are_named(root: Path, tmp_path: Path) -> None:
    def other_hashes(index: dict[str, Any]) -> None:
        index["arrays"][KERNEL]["sha256"][1] = index["arrays"][KERNEL]["sha256"][2] = "0" * 64
        index["arrays"][MOMENTS]["sha256"][3] = "0" * 64

    path = copied(root, tmp_path) / "global_step1"
    change_index(path, other_hashes)
    with pytest.raises(
        CheckpointError, match=rf"2 damaged: {KERNEL} \(rows 1, 2\), {MOMENTS} \(row 3\)\."
    ):
        verify_checkpoint(path)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_files_that_cannot_be_read_name_the_arrays_in_them(
    root: Path, tmp_path: Path, damage: str
) -> None:
    path = copied(root, tmp_path)
    for file in files_with(path, np.asarray(state_arrays(trained().state)[MOMENTS])[0]):
        if damage == "removed":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:100])
    named = (
        rf"damaged: .*{MOMENTS} \(unreadable\).*\. Reading failed with \w+: .*\w.*\. Load .* "
        r"restore the files"
    )
    with pytest.raises(CheckpointError, match=named):
        verify_checkpoint(path)


def test_many_damaged_arrays_are_counted(root: Path, tmp_path: Path) -> None:
    path = copied(root, tmp_path)
    for file in path.rglob("d/*"):
        file.unlink()
    count = verify_checkpoint(saved(root)).num_arrays
    with pytest.raises(
        CheckpointError,
        match=rf"its {count} arrays .* got {count} damaged: .*, and {count - 12} more\.",
    ):
        verify_checkpoint(path)


def test_there_must_be_a_checkpoint(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint\. Pass the directory that was passed to save_checkpoint",
    ):
        verify_checkpoint(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"got tag='best' .* 'global_step1'\. Use one of these tags"
    ):
        verify_checkpoint(saved(root), "best")
