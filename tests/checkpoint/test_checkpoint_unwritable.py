"""What cannot be saved.

An error that says what and where, and neither the engine nor any checkpoint changes.
"""

import contextlib
import datetime
import functools
import gc
import os
import re
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _no_descriptors import no_descriptors
from _one_run import Run, assert_holds, entry, make_run
from _refusals import check_refused

from jaxpipe import RepeatingLoader
from jaxpipe.checkpoint import _writer, committed_tags
from jaxpipe.errors import CheckpointError

# Where one array cannot be written, Orbax leaves the writing of the others alone, which then end in
# a closed loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

WIDTH = 1500
PAGE = 4096


@pytest.fixture(scope="module")
def module_run() -> Run:
    return started()


@pytest.fixture
def run(module_run: Run) -> Iterator[Run]:
    """A run that stands inside its data; nothing here needs a trained state."""
    yield module_run
    gc.collect()  # what Orbax left unawaited


@pytest.fixture(scope="module")
def background() -> Run:
    """The same, saving in the background."""
    return started(checkpoint={"async_save": True})


def started(**config: Any) -> Run:
    run = make_run(WIDTH, **config)
    next(run.data)
    return run


def listing(path: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(path)): each.read_bytes() if each.is_file() else None
        for each in path.rglob("*")
    }


def left_over(path: Path) -> list[Path]:
    """Data that no commit names."""
    named = {path / tag / commit.data for tag, commit in committed_tags(path).items()}
    return [each for each in path.glob("*/data-*") if each not in named]


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 1 MiB large."""
    path = tmp_path / "disk"
    path.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def room(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_bsize


def leave_room(path: Path, num_pages: int) -> None:
    ballast = path / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes(room(path) - num_pages * PAGE))


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment(run: Run, disk: Path) -> None:
    """With a little more room at each try, until there is enough."""
    before = run.held()
    run.engine.save_checkpoint(disk, "one")
    one = listing(disk / "one")
    num_pages, messages = 0, []
    while not messages or messages[-1]:
        leave_room(disk, num_pages)
        messages.append(saving_failure(run, disk))
        assert_holds(run, before)
        assert left_over(disk) == [], num_pages
        assert listing(disk / "one") == one, num_pages
        tags = list(committed_tags(disk))
        # There may be room for all but `latest`.
        assert tags in (["one"], ["one", "two"]), num_pages
        for tag in tags:
            run.engine.load_checkpoint(disk, tag)
            assert_holds(run, before)
        num_pages += 1 if "No space left on device" in messages[-1] else 4
    assert num_pages > 20
    assert all("/two could not be written: " in message for message in messages[:-1])
    assert all(
        "Make room or check the file system, and save again." in message
        for message in messages[:-1]
    )
    assert tags == ["one", "two"]
    assert (disk / "latest").read_text() in ("one", "two")  # there may be room for all but this
    assert list(disk.rglob("*.partial")) == []


@pytest.mark.slow
def test_writers_that_end_later_than_the_save_that_failed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make folders again that have just been removed."""
    monkeypatch.setattr(_writer, "_QUIET_POLLS", 300)  # a machine may be slow
    run.engine.save_checkpoint(tmp_path, "one")
    late: list[Path] = []

    def write() -> None:
        while not (found := list(tmp_path.glob("two/data-*"))):
            time.sleep(0.001)
        while found[0].exists():
            time.sleep(0.001)
        time.sleep(0.2)
        late.append(found[0] / "arrays" / "state")
        late[0].mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):  # removed again already
            (late[0] / "zarr.json").write_text("{}")

    thread = threading.Thread(target=write)
    thread.start()
    with limited_files(PAGE), pytest.raises(CheckpointError, match="/two could not be written: "):
        run.engine.save_checkpoint(tmp_path, "two")
    thread.join()
    assert left_over(tmp_path) == []
    late[0].mkdir(parents=True)  # later still
    (late[0] / "zarr.json").write_text("{}")
    run.engine.save_checkpoint(tmp_path, "one")
    assert left_over(tmp_path) == []
    assert not (tmp_path / "two").exists()


def saving_failure(run: Run, path: Path) -> str:
    try:
        run.engine.save_checkpoint(path, "two")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("num_bytes", sweep(1, [5 * PAGE, 0, 1000]))
def test_files_that_may_not_grow(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """The failure is told once what was written is gone, without waiting for more to come."""
    monkeypatch.setattr(_writer, "_CLEANING_S", 30.0)
    before = run.held()
    run.engine.save_checkpoint(tmp_path, "one")
    one = listing(tmp_path)
    begin = time.monotonic()
    with (
        limited_files(num_bytes),
        pytest.raises(
            CheckpointError,
            match=r"/one could not be written: .*\. Earlier .* Make room or check the file",
        ),
    ):
        run.engine.save_checkpoint(tmp_path, "one")
    assert time.monotonic() < begin + 30
    assert_holds(run, before)
    assert listing(tmp_path) == one
    run.engine.load_checkpoint(tmp_path)
    assert_holds(run, before)
    run.engine.save_checkpoint(tmp_path / "elsewhere")
    run.engine.load_checkpoint(tmp_path / "elsewhere")
    assert_holds(run, before)


NEXT: dict[str, Callable[[Run, Path], Any]] = {
    "save_checkpoint": lambda run, path: run.engine.save_checkpoint(path, "three"),
    "load_checkpoint": lambda run, path: run.engine.load_checkpoint(path),
    "wait_for_checkpoint": lambda run, path: run.engine.wait_for_checkpoint(),
}


@pytest.mark.parametrize("call", sweep(1, [*NEXT]))
def test_a_failure_in_the_background_is_raised_by_the_next_call(
    background: Run, tmp_path: Path, call: str
) -> None:
    run, before = background, background.held()
    run.engine.save_checkpoint(tmp_path, "one")
    run.engine.wait_for_checkpoint()
    one = listing(tmp_path)
    with limited_files(PAGE):
        run.engine.save_checkpoint(tmp_path, "two")
        with pytest.raises(
            CheckpointError,
            match="/two could not be written: .* Make room or check the file system",
        ):
            NEXT[call](run, tmp_path)
    assert_holds(run, before)
    assert listing(tmp_path) == one
    NEXT[call](run, tmp_path)
    run.engine.wait_for_checkpoint()
    assert_holds(run, before)
    assert left_over(tmp_path) == []


def test_a_directory_that_is_read_only(run: Run, disk: Path) -> None:
    before = run.held()
    run.engine.save_checkpoint(disk, "one")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for path in (disk, disk / "deeper"):
        with pytest.raises(
            CheckpointError,
            match=r"save_dir='.*' and Read-only file system at .*\. Check its perm.*",
        ):
            run.engine.save_checkpoint(path, "two")
    run.engine.load_checkpoint(disk)
    assert_holds(run, before)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ("save", "File exists at .*/save. Check its permissions, or choose another"),
        ("save/two", "File exists at .*/save/two. Check its permissions, or choose another"),
    ],
)
def test_a_file_in_place_of_a_folder(run: Run, tmp_path: Path, place: str, match: str) -> None:
    before = run.held()
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("mine")
    was = listing(tmp_path)
    with pytest.raises(CheckpointError, match=f"save_dir='{tmp_path / 'save'}' and {match}"):
        run.engine.save_checkpoint(tmp_path / "save", "two")
    assert listing(tmp_path) == was
    assert_holds(run, before)


def test_a_directory_inside_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        CheckpointError, match="Not a directory at .*/file/deeper. Check its permissions, or choose"
    ):
        run.engine.save_checkpoint(tmp_path / "file" / "deeper")


TAGS: list[Any] = [
    "",
    ".",
    "..",
    "a/b",
    "/etc",
    "../two",
    "two/",
    "a\\b",
    "a\0b",
    "latest",
    ".lock",
]
TAGS += [3, b"two", ("two",)]


def test_a_tag_that_is_no_name(module_run: Run, tmp_path: Path) -> None:
    before = module_run.held()
    for tag in TAGS:
        words = (
            rf"tag must be a plain name .* got tag={re.escape(repr(tag))}\. Write for .* 'best', or"
        )
        for call in (module_run.engine.load_checkpoint, module_run.engine.save_checkpoint):
            check_refused(CheckpointError, [(words, call)], tmp_path / "save", tag)
    assert listing(tmp_path) == {}
    assert_holds(module_run, before)


@pytest.mark.parametrize("tag", ["\ud800", 300 * "x"], ids=["surrogate", "long"])
def test_a_tag_that_the_file_system_does_not_take(
    module_run: Run, tmp_path: Path, tag: str
) -> None:
    before = module_run.held()
    for call in (module_run.engine.load_checkpoint, module_run.engine.save_checkpoint):
        with pytest.raises(CheckpointError):
            call(tmp_path, tag)
    assert listing(tmp_path) == {}
    assert_holds(module_run, before)


LOOP: list[Any] = []
LOOP.append({"again": LOOP})


CLIENT_STATES: list[tuple[Any, str]] = [
    ({"a": [10**5000]}, r"\['a'\]\[0\] must be .* at most 4300 digits, .* 16610 bits\. Write hex"),
    (
        {10**5000: 1},
        r"^keys of client_state must be strings.*=<int too long to be printed>\. Write",
    ),
    ({"a": LOOP}, r"\['a'\]\[0\]\['again'\].* at most 100 deep.* or contains itself\. Store"),
    ({"a": (1, 2)}, r"\['a'\] must be .* got a tuple\. Write list\(\.\.\.\)"),
    ({"a": {1}}, r"\['a'\] must be .* got a set\. Write list\(\.\.\.\)"),
    ({"a": [1, {"b": (2,)}]}, r"\['a'\]\[1\]\['b'\] must be .* got a tuple"),
    ({"best": jnp.float32(0.5)}, r"\['best'\] must be .* got a ArrayImpl\. Write value\.item"),
    ({"a": np.zeros(3)}, r"\['a'\] must be .* got a ndarray\. Write value\.tolist"),
    ({"a": object()}, r"\['a'\] must be .* got a object\. Store plain values to rebuild it from"),
    ({"a": b"x"}, r"\['a'\] must be .* got a bytes\. Store plain values to rebuild it from"),
    ({"a": datetime.date(2024, 1, 1)}, r"\['a'\] must be .* got a date\. Store plain values to"),
    ({"a": {1: "b"}}, r"^keys of client_state\['a'\] must be strings.* got key=1\. Write '1'"),
    ({None: "b"}, r"^keys of client_state must be strings.* got key=None\. Write 'None'"),
]


def test_a_client_state_that_json_does_not_know(module_run: Run, tmp_path: Path) -> None:
    before = module_run.held()
    save = functools.partial(module_run.engine.save_checkpoint, tmp_path / "save")
    table = [
        (
            words if words[0] == "^" else f"^client_state{words}",
            functools.partial(save, client_state=state),
        )
        for state, words in CLIENT_STATES
    ]
    check_refused(CheckpointError, table)
    assert listing(tmp_path) == {}
    assert_holds(module_run, before)


@pytest.mark.parametrize("client_state", [None, [1], "text", 3], ids=repr)
def test_a_client_state_that_is_no_dictionary(
    module_run: Run, tmp_path: Path, client_state: Any
) -> None:
    with pytest.raises(CheckpointError, match="client_state must be a dictionary"):
        module_run.engine.save_checkpoint(tmp_path / "save", client_state=client_state)
    assert listing(tmp_path) == {}


class Placed(RepeatingLoader[Any]):
    """Data whose place is no JSON."""

    def get_state(self) -> Any:
        return {"at": object()}


def test_a_place_in_the_data_that_json_does_not_know(run: Run, tmp_path: Path) -> None:
    """All the rest is saved."""
    run.engine.set_dataiterator(Placed([entry(0)]))
    why = (
        r"the checkpoint holds no place in the data, because .*\['at'\] must be .* got a object. St"
    )
    try:
        with pytest.warns(UserWarning, match=why):
            run.engine.save_checkpoint(tmp_path / "save")
    finally:
        run.engine.set_dataiterator(run.data)
    before = run.held()
    with pytest.warns(UserWarning, match=why):
        run.engine.load_checkpoint(tmp_path / "save")
    assert_holds(run, before)


def test_a_state_that_json_knows_comes_back(run: Run, tmp_path: Path) -> None:
    kept = {
        "epoch": 3,
        "best": 0.1,
        "on": True,
        "none": None,
        "names": ["a", "é\u2028", "\ud800"],
        "deep": {"": {}},
    }
    run.engine.save_checkpoint(tmp_path, client_state=kept)
    _, found = run.engine.load_checkpoint(tmp_path)
    assert found == kept
    assert [type(value) for value in found.values()] == [type(value) for value in kept.values()]


def test_numbers_of_numpy_come_back_as_pythons(run: Run, tmp_path: Path) -> None:
    given = {
        "a": np.float32(0.5),
        "b": [np.int64(3), {"c": np.bool_(True)}],
        "d": np.float64("inf"),
        "e": np.str_("x"),
    }
    run.engine.save_checkpoint(tmp_path, client_state=given)
    _, found = run.engine.load_checkpoint(tmp_path)
    assert found == {"a": 0.5, "b": [3, {"c": True}], "d": float("inf"), "e": "x"}
    assert [type(found["a"]), type(found["b"][0]), type(found["b"][1]["c"]), type(found["e"])] == [
        float,
        int,
        bool,
        str,
    ]


@pytest.mark.parametrize("num_free", [0, 1, 4])
def test_no_free_descriptor_is_said(run: Run, tmp_path: Path, num_free: int) -> None:
    """Not that the disk is full, nor that the files are damaged."""
    engine = run.engine
    engine.save_checkpoint(tmp_path)
    with no_descriptors(num_free), pytest.raises(CheckpointError, match="no free file descriptor"):
        engine.save_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    with (
        no_descriptors(min(num_free, 2)),
        pytest.raises(CheckpointError, match="Too many open files.* no free file descriptor"),
    ):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
