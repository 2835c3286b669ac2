"""The directory of checkpoints.

Which one is found, which are kept, and that nothing else is touched.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, assert_holds, make_run

from jaxpipe.checkpoint import (
    CheckpointWriter,
    RunState,
    committed_tags,
    find_checkpoint,
    load_params,
    open_checkpoint,
    verify_checkpoint,
)
from jaxpipe.errors import CheckpointError


@pytest.fixture(scope="module")
def run() -> Run:
    """A run that stands inside its data.

    Its parameters do not matter here, and its step is what each test says.
    """
    run = make_run()
    next(run.data)
    return run


def save(
    run: Run, path: Path, *steps: int, tag: str | None = None, latest: bool = True, **keep: Any
) -> None:
    """Save as after so many steps."""
    writer = CheckpointWriter(**keep)
    for step in steps:
        state = RunState(global_steps=step, global_samples=10 * step, client_state={"step": step})
        writer.save(path, run.engine.pipeline, run.engine.state, state, tag=tag, save_latest=latest)


def found(path: Path, tag: str | None = None) -> tuple[str, int]:
    """The tag that is found, and the step that it holds."""
    checkpoint = open_checkpoint(path, tag)
    assert checkpoint.index.client_state == {"step": checkpoint.index.global_steps}
    return checkpoint.tag, checkpoint.index.global_steps


def steps_of(path: Path) -> dict[str, int]:
    return {tag: commit.global_steps for tag, commit in committed_tags(path).items()}


def assert_tidy(path: Path) -> None:
    """There is no data but what a commit names, and no file that was being replaced."""
    named = {path / tag / commit.data for tag, commit in committed_tags(path).items()}
    assert set(path.glob("*/data-*")) == named
    assert list(path.rglob("*.partial")) == []


def test_an_engine_saves_and_finds_its_steps(run: Run, tmp_path: Path) -> None:
    engine = run.engine
    before = run.held()
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    assert engine.save_checkpoint(tmp_path, "best", {"epoch": 2}, save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step0"
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step0"), {"epoch": 1})
    assert engine.load_checkpoint(str(tmp_path), "best") == (str(tmp_path / "best"), {"epoch": 2})
    assert engine.load_checkpoint(tmp_path / "best") == (str(tmp_path / "best"), {"epoch": 2})
    assert engine.load_checkpoint(f"{tmp_path}/best/") == (str(tmp_path / "best"), {"epoch": 2})
    assert_holds(run, before)


def test_the_last_that_was_committed_is_found(run: Run, tmp_path: Path) -> None:
    for step in (5, 9, 2):
        save(run, tmp_path, step)
        assert found(tmp_path) == (f"global_step{step}", step)
    save(run, tmp_path, 7, tag="best", latest=False)
    assert found(tmp_path) == ("global_step2", 2)
    assert found(tmp_path, "best") == ("best", 7)
    save(run, tmp_path, 9)
    assert found(tmp_path) == ("global_step9", 9)
    assert list(steps_of(tmp_path)) == ["global_step5", "global_step2", "best", "global_step9"]


def test_latest_that_lags_behind_does_not_count(run: Run, tmp_path: Path) -> None:
    """As after an end between the commit and `latest`."""
    save(run, tmp_path, 1, 2)
    (tmp_path / "latest").write_text("global_step1\n")
    with pytest.warns(
        UserWarning,
        match="/latest names 'global_step1', but 'global_step2' was committed after .* load "
        "tag='global_step1'",
    ):
        assert found(tmp_path) == ("global_step2", 2)
    (tmp_path / "latest").unlink()
    assert found(tmp_path) == ("global_step2", 2)
    (tmp_path / "latest").write_text("global_step2\n")
    assert found(tmp_path) == ("global_step2", 2)


@pytest.mark.parametrize("content", ["", "../x", "a" * 256, "\u00fc" * 200, "global_step0"])
def test_latest_that_names_nothing_is_passed_over(run: Run, tmp_path: Path, content: str) -> None:
    save(run, tmp_path, 1)
    (tmp_path / "latest").write_text(content)
    with pytest.warns(UserWarning, match="latest must be a readable text|is the newest checkpoint"):
        assert found(tmp_path) == ("global_step1", 1)


def test_without_save_latest_only_the_tag_finds_it(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path, 1, latest=False)
    assert not (tmp_path / "latest").exists()
    assert find_checkpoint(tmp_path) is None
    with pytest.raises(
        CheckpointError,
        match=f"got path='{tmp_path}' and the checkpoints 'global_step1'. Pass .* or a tag",
    ):
        load_params(tmp_path)
    assert found(tmp_path, "global_step1") == ("global_step1", 1)
    assert found(tmp_path / "global_step1") == ("global_step1", 1)


@pytest.mark.parametrize("kind", ["nothing", "empty", "file", "other-folders", "without-commit"])
def test_no_checkpoint(run: Run, tmp_path: Path, kind: str) -> None:
    before, path = run.held(), tmp_path / "save"
    if kind == "file":
        path.write_text("mine")
    elif kind != "nothing":
        path.mkdir()
    if kind == "other-folders":
        (path / "logs" / "run-1").mkdir(parents=True)
    if kind == "without-commit":
        save(run, path, 1)
        (path / "global_step1" / "commit.json").unlink()
        (path / "latest").unlink()
    with pytest.warns(
        UserWarning,
        match=f"load_checkpoint found no checkpoint in '{path}'; the engine is unchanged",
    ) as caught:
        assert run.engine.load_checkpoint(path) == (None, {})
    assert len(caught) == 1
    with pytest.raises(
        CheckpointError,
        match=f"got path='{path}' and no checkpoint. Pass the directory that was passed to",
    ):
        load_params(path)
    with pytest.raises(
        CheckpointError, match="got tag='best' in '.*/save', which holds no checkpoint. Use one of"
    ):
        run.engine.load_checkpoint(path, "best")
    assert_holds(run, before)


def test_an_unknown_tag_lists_those_that_are_there(run: Run, tmp_path: Path) -> None:
    before = run.held()
    save(run, tmp_path, 3, 1)
    save(run, tmp_path, 3, tag="best")
    (tmp_path / "unfinished" / "data-9").mkdir(parents=True)
    for tag in ("global_step2", "unfinished", "global_step"):
        with pytest.raises(CheckpointError) as caught:
            run.engine.load_checkpoint(tmp_path, tag)
        assert str(caught.value) == (
            f"tag must name a checkpoint, but got tag={tag!r} in '{tmp_path}', which holds the "
            "checkpoints 'global_step3', 'global_step1', 'best'. Use one of these tags, or None "
            "for the latest."
        )
    assert_holds(run, before)


def test_of_many_tags_the_last_are_listed(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path, *range(10))
    with pytest.raises(
        CheckpointError,
        match="holds the checkpoints ..., 'global_step2', .*, 'global_step9'. Use one",
    ):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "steps", "kept"),
    sweep(
        4,
        [
            (2, None, range(1, 6), [4, 5]),
            (1, 10, [0, 5, 10, 15], [0, 10, 15]),
            (2, None, [1, 2, 1, 3], [1, 3]),
            (2, 3, range(1, 9), [3, 6, 7, 8]),
            (None, None, range(1, 6), [1, 2, 3, 4, 5]),
            (1, None, range(1, 4), [3]),
            (9, None, range(1, 4), [1, 2, 3]),
            (1, 1, range(1, 4), [1, 2, 3]),
            (2, None, [5, 9, 2], [9, 2]),
        ],
        unpack=True,
    ),
    ids=str,
)
def test_which_are_kept(
    run: Run,
    tmp_path: Path,
    keep_last: int | None,
    keep_every: int | None,
    steps: Any,
    kept: list[int],
) -> None:
    save(run, tmp_path, *steps, keep_last=keep_last, keep_every=keep_every)
    assert list(steps_of(tmp_path).values()) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["latest", *(f"global_step{n}" for n in kept)]
    )
    assert found(tmp_path) == (f"global_step{kept[-1]}", kept[-1])
    assert_tidy(tmp_path)


def test_only_tags_of_steps_are_removed(run: Run, tmp_path: Path) -> None:
    others = [
        "best",
        "global_step",
        "global_step1x",
        "x_global_step1",
        "global_step-1",
        "global_step 1",
        "Global_step1",
    ]
    for tag in others:
        save(run, tmp_path, 1, tag=tag, keep_last=1)
    save(run, tmp_path, *range(1, 6), keep_last=1)
    assert set(steps_of(tmp_path)) == {*others, "global_step5"}
    save(run, tmp_path, 6, tag="best", keep_last=1)
    assert set(steps_of(tmp_path)) == {*others, "global_step5"}
    assert found(tmp_path) == ("best", 6)


def test_what_is_not_found_without_its_tag_does_not_push_out_what_is(
    run: Run, tmp_path: Path
) -> None:
    """Else a directory with checkpoints would have none to go on from."""
    save(run, tmp_path, 1)
    save(run, tmp_path, 2, 3, latest=False, keep_last=1)
    assert found(tmp_path) == ("global_step1", 1)
    assert found(tmp_path, "global_step3") == ("global_step3", 3)


def test_a_tag_is_replaced(run: Run, tmp_path: Path) -> None:
    save(run, tmp_path, 1, 2)
    for step in (3, 4):
        save(run, tmp_path, step, tag="best")
        assert found(tmp_path) == ("best", step)
        assert found(tmp_path, "best") == ("best", step)
        assert_tidy(tmp_path)
    save(run, tmp_path, 5, tag="global_step1")
    assert list(steps_of(tmp_path).items()) == [
        ("global_step2", 2),
        ("best", 4),
        ("global_step1", 5),
    ]
    assert_tidy(tmp_path)


def test_leftovers_are_removed_by_the_next_save(run: Run, tmp_path: Path) -> None:
    """Data in a tag that has a commit, and in one that has none.

    And files that were being replaced.
    """
    save(run, tmp_path, 1)
    save(run, tmp_path, 1, tag="best")
    (data,) = (tmp_path / "global_step1").glob("data-*")
    (tmp_path / "global_step2").mkdir()
    for tag in ("best", "global_step2"):
        shutil.copytree(data, tmp_path / tag / data.name)
        (tmp_path / tag / "commit.json.partial").write_text("{")
    (tmp_path / "latest.partial").write_text("b")
    assert steps_of(tmp_path) == {"global_step1": 1, "best": 1}
    save(run, tmp_path, 3)
    assert steps_of(tmp_path) == {"global_step1": 1, "best": 1, "global_step3": 3}
    assert not (tmp_path / "global_step2").exists()
    assert_tidy(tmp_path)
    assert found(tmp_path, "best") == ("best", 1)


OWN = [
    "notes.txt",
    "logs/events",
    "best/notes.txt",
    "best/data.csv",
    "global_step1/why.txt",
    "corpus/data-1/shard.bin",
    "corpus/data-2/index.json",
    "corpus/data-3.csv",
    "best/data-old/mine.txt",
    "best/data-3.txt",
]


@pytest.mark.parametrize("place", sweep(4, [*OWN]))
def test_what_others_keep_there_stays(run: Run, tmp_path: Path, place: str) -> None:
    save(run, tmp_path, 1)
    save(run, tmp_path, 1, tag="best")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")
    save(run, tmp_path, 2, 3, keep_last=1)
    save(run, tmp_path, 3, tag="best")
    assert (tmp_path / place).read_text() == "mine"
    assert steps_of(tmp_path) == {"global_step3": 3, "best": 3}


TAGS = [
    "best model",
    "schön ✓",
    "-rf",
    "~",
    "$HOME",
    "a.b",
    ".hidden",
    "...",
    "data-1",
    "LATEST",
    "%s",
    "'\"",
    "a\nb",
]
TAGS += ["index.json", "latest.old"]


@pytest.mark.parametrize("tag", sweep(5, [*TAGS]), ids=repr)
def test_tags_with_odd_names(run: Run, tmp_path: Path, tag: str) -> None:
    """They are found with and without their name, and get in nobody's way."""
    save(run, tmp_path, 1)
    save(run, tmp_path, 2, tag=tag)
    assert found(tmp_path) == (tag, 2)
    assert found(tmp_path, tag) == (tag, 2)
    assert found(tmp_path / tag) == (tag, 2)
    save(run, tmp_path, 3, tag=tag)
    assert found(tmp_path) == (tag, 3)
    save(run, tmp_path, 4)
    assert found(tmp_path) == ("global_step4", 4)
    assert steps_of(tmp_path) == {"global_step1": 1, tag: 3, "global_step4": 4}


@pytest.mark.parametrize(("folder", "tag"), [("lr[0.1]", "a"), ("run", "best[1]*?")])
def test_what_is_a_pattern_elsewhere(run: Run, tmp_path: Path, folder: str, tag: str) -> None:
    save(run, tmp_path / folder, 1, tag=tag)
    assert verify_checkpoint(tmp_path / folder).tag == tag
    assert [path.name for path in (tmp_path / folder / tag).glob("data-*/*")] != []
    assert not any(path.is_symlink() for path in (tmp_path / folder).rglob("*"))


def test_a_checkpoints_own_folder(run: Run, tmp_path: Path) -> None:
    before = run.held()
    run.engine.save_checkpoint(tmp_path / "save", "best", {"epoch": 1})
    moved = shutil.copytree(tmp_path / "save" / "best", tmp_path / "moved")
    assert run.engine.load_checkpoint(moved) == (str(moved), {"epoch": 1})
    assert_holds(run, before)
    assert load_params(moved)["layers"].keys() == load_params(tmp_path / "save")["layers"].keys()
    (moved / "commit.json").unlink()
    with pytest.warns(UserWarning, match="found no checkpoint in '.*/moved'"):
        assert run.engine.load_checkpoint(moved) == (None, {})


PLACES = [
    (".", "save"),
    (".", "save/best"),
    (".", "./save/"),
    ("save", "."),
    ("save/best", "."),
    ("save", "../save"),
]


@pytest.mark.parametrize(("place", "path"), PLACES)
def test_relative_paths(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, path: str
) -> None:
    before = run.held()
    monkeypatch.chdir(tmp_path)
    run.engine.save_checkpoint("save", "best", {"epoch": 1})
    monkeypatch.chdir(tmp_path / place)
    found, client_state = run.engine.load_checkpoint(path)
    assert client_state == {"epoch": 1}
    assert found is not None
    assert Path(found).resolve() == tmp_path / "save" / "best"
    assert_holds(run, before)
    assert load_params(path)["layers"].keys() == load_params(tmp_path / "save")["layers"].keys()


def test_a_directory_that_moves_while_relative(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative directory is that of the call.

    Wherever the process goes while saving in the background.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    writer = CheckpointWriter()
    state = RunState(global_steps=1, client_state={"step": 1})
    writer.save("save", run.engine.pipeline, run.engine.state, state, background=True)
    monkeypatch.chdir(tmp_path / "b")
    writer.wait()
    assert found(tmp_path / "a" / "save") == ("global_step1", 1)
    assert list((tmp_path / "b").iterdir()) == []


def test_a_damaged_commit_beside_others(run: Run, tmp_path: Path) -> None:
    """It is passed over, with a warning, unless it is the latest.

    Saving goes on, and nothing of it is removed.
    """
    save(run, tmp_path, 1, 2)
    (tmp_path / "global_step1" / "commit.json").write_text("{")
    with pytest.warns(
        UserWarning,
        match="Passed over: .*global_step1/commit.json must be a commit .* Load another",
    ):
        assert found(tmp_path) == ("global_step2", 2)
    assert found(tmp_path, "global_step2") == ("global_step2", 2)
    save(run, tmp_path, 3)
    assert len(list((tmp_path / "global_step1").glob("data-*/index.json"))) == 1
    (tmp_path / "global_step3" / "commit.json").write_text("{")
    with pytest.raises(
        CheckpointError,
        match="global_step3/commit.json must be a commit .* Load another tag, or restore",
    ):
        find_checkpoint(tmp_path)
    assert found(tmp_path, "global_step2") == ("global_step2", 2)


@pytest.mark.parametrize(
    "name",
    sweep(
        3,
        ["a\\[b", "a*b?", "caf\udce9", "a\\b", "\\", "[a]", "::", "a\nb"],
        rest=pytest.mark.slow,
    ),
)
def test_names_that_libraries_read_otherwise(run: Run, tmp_path: Path, name: str) -> None:
    for path in (tmp_path / name, tmp_path / name / "run"):
        save(run, path, 1, 2, keep_last=1)
        assert verify_checkpoint(path).tag == "global_step2"
        assert {each.name for each in path.iterdir()} == {"global_step2", "latest"}
    assert [each.name for each in tmp_path.iterdir()] == [name]
