"""What a link leads to is read, but neither changed nor removed.

And what cannot be removed is in nobody's way.
"""

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, make_run

from jaxpipe.checkpoint import (
    CheckpointWriter,
    RunState,
    committed_tags,
    load_params,
    verify_checkpoint,
)
from jaxpipe.errors import CheckpointError


@pytest.fixture(scope="module")
def run() -> Run:
    return make_run()


def save(run: Run, path: Path, *steps: int, tag: str | None = None, **keep: Any) -> None:
    writer = CheckpointWriter(**keep)
    for step in steps:
        writer.save(
            path, run.engine.pipeline, run.engine.state, RunState(global_steps=step), tag=tag
        )


def listing(path: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None
        for each in path.rglob("*")
    }


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Path:
    """Another run's directory, with data that an unfinished save left too."""
    save(run, tmp_path / "other", 1, 2)
    (data,) = (tmp_path / "other" / "global_step1").glob("data-*")
    shutil.copytree(data, data.with_name("data-7-0a"))
    return tmp_path / "other"


def test_a_tag_that_is_a_link_is_loaded_and_never_removed(
    run: Run, other: Path, tmp_path: Path
) -> None:
    """As where a run goes on from a checkpoint of another."""
    was, path = listing(other), tmp_path / "save"
    path.mkdir()
    (path / "global_step1").symlink_to("../other/global_step1")
    assert run.engine.load_checkpoint(path, "global_step1")[0] == str(path / "global_step1")
    save(run, path, 2, 3, 4, keep_last=1)
    assert listing(other) == was
    assert list(committed_tags(path)) == ["global_step1", "global_step4"]
    assert (path / "global_step1").is_symlink()


def test_a_tag_that_is_a_link_is_not_written(run: Run, other: Path, tmp_path: Path) -> None:
    was, path = listing(other), tmp_path / "save"
    path.mkdir()
    (path / "global_step1").symlink_to("../other/global_step1")
    match = (
        f"tag must not be a link.* got tag='global_step1' in save_dir='{path}', a link to "
        "'../other/global_step1'. Rem"
    )
    with pytest.raises(CheckpointError, match=match):
        save(run, path, 1)
    assert listing(other) == was
    assert [each.name for each in path.iterdir()] == ["global_step1"]


def test_data_behind_a_link_stay(run: Run, other: Path, tmp_path: Path) -> None:
    """In each kind of tag, and behind several names.

    One that is written anew, one that is removed, and one without a commit.
    """
    was, path = listing(other), tmp_path / "save"
    save(run, path, 1)
    save(run, path, 1, tag="best")
    (data,) = (other / "global_step1").glob("data-1-*")
    (path / "unfinished").mkdir()
    for tag in ("global_step1", "best", "unfinished"):
        (path / tag / "data-9-abcd").symlink_to(data)
        (path / tag / "data-8-abcd").symlink_to(other)
    save(run, path, 2, 3, keep_last=1)
    save(run, path, 3, tag="best")
    assert listing(other) == was
    assert set(committed_tags(path)) == {"global_step3", "best"}
    assert all(
        (path / tag / "data-9-abcd").is_symlink() for tag in ("global_step1", "best", "unfinished")
    )


def test_links_inside_data_are_removed_alone(run: Run, other: Path, tmp_path: Path) -> None:
    was, path = listing(other), tmp_path / "save"
    save(run, path, 1)
    (data,) = (path / "global_step1").glob("data-*")
    (data / "link").symlink_to(other)
    (data / "arrays" / "link").symlink_to(other / "global_step1" / "commit.json")
    save(run, path, 2, keep_last=1)
    assert listing(other) == was
    assert list(committed_tags(path)) == ["global_step2"]
    assert not (path / "global_step1").exists()


def test_data_that_were_moved_and_linked_back(run: Run, tmp_path: Path) -> None:
    """They can be loaded, and stay."""
    path = tmp_path / "save"
    save(run, path, 1)
    (data,) = (path / "global_step1").glob("data-*")
    moved = Path(shutil.move(data, tmp_path / "moved"))
    data.symlink_to(moved)
    was = listing(moved)
    save(run, path, 2, 3, keep_last=1)
    assert listing(moved) == was
    assert list(committed_tags(path)) == ["global_step1", "global_step3"]
    assert verify_checkpoint(path, "global_step1").tag == "global_step1"


@pytest.mark.parametrize("name", ["commit.json", "commit.json.partial"])
@pytest.mark.parametrize("is_there", [True, False], ids=["file", "dangling"])
def test_nothing_is_written_through_a_link(
    run: Run, tmp_path: Path, name: str, is_there: bool
) -> None:
    mine, path = tmp_path / "mine.txt", tmp_path / "save"
    (path / "best").mkdir(parents=True)
    if is_there:
        mine.write_text("mine")
    for place in (path / "best" / name, path / name.replace("commit.json", "latest")):
        place.symlink_to(mine)
    save(run, path, 1, tag="best")
    assert list(committed_tags(path)) == ["best"]
    assert (path / "latest").read_text() == "best"
    assert (mine.read_text() if mine.exists() else None) == ("mine" if is_there else None)


@pytest.fixture
def immutable() -> Iterator[list[Path]]:
    """Makes what is appended to it by `chattr +i` changeable again."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def freeze(path: Path, immutable: list[Path]) -> None:
    if shutil.which("chattr") is None:
        pytest.skip("there is no chattr command")
    done = subprocess.run(["chattr", "+i", str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"files cannot be made immutable here: {done.stderr.strip()}")
    immutable.append(path)


FROZEN = [
    "data-7-0a/index.json",
    "data-7-0a",
    "data-7-0a/.jaxpipe",
    "commit.json.partial",
    "commit.json",
    "",
]


@pytest.mark.parametrize("place", sweep(3, [*FROZEN]))
@pytest.mark.parametrize("tag", ["global_step1", "unfinished"])
def test_what_cannot_be_removed_is_in_nobodys_way(
    run: Run,
    tmp_path: Path,
    immutable: list[Path],
    caplog: pytest.LogCaptureFixture,
    tag: str,
    place: str,
) -> None:
    """Leftovers, and a checkpoint that need not be kept: all saves after it end, and warn."""
    path = tmp_path / "save"
    save(run, path, 1)
    save(run, path, 1, tag=tag)
    (data,) = (path / tag).glob("data-*")
    shutil.copytree(data, data.with_name("data-7-0a"))
    (path / tag / "commit.json.partial").write_text("{")
    if tag == "unfinished" and place != "commit.json":
        (path / tag / "commit.json").unlink()
        (path / "latest").unlink()
    freeze(path / tag / place, immutable)
    with caplog.at_level(logging.WARNING, "jaxpipe"):
        save(run, path, 2, 3, 4, keep_last=1)
    assert "global_step4" in committed_tags(path)
    assert not {"global_step2", "global_step3"} & committed_tags(path).keys()
    if (tag, place) != ("unfinished", "commit.json"):  # a checkpoint that is kept
        assert "Operation not permitted" in caplog.text
        assert str(path / tag) in caplog.text
    for each in committed_tags(path):
        load_params(path, each)
