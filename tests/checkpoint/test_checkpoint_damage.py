"""Damaged and foreign checkpoints: an error that says what and where, and an engine as it was."""

import hashlib
import json
import math
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import pytest
from _covering import sweep
from _one_run import FP16, Averaging, Run, assert_holds, entry, make_engine, make_run

from jaxpipe import LayerSpec, RepeatingLoader
from jaxpipe.checkpoint import (
    export_safetensors,
    inspect_checkpoint,
    load_collections,
    load_params,
    verify_checkpoint,
)
from jaxpipe.data import BatchLoader
from jaxpipe.errors import CheckpointError, DataError
from jaxpipe.layers import flatten_dict

WIDTH = 1500  # arrays large enough to lie in files of their own
TAG = "global_step2"
# Where one array cannot be read, Orbax leaves the reading of the others alone, which then end in a
# closed loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

REPAIR = (
    r"[Ll]oad (another tag|one of them)|restore (it|the file)|Use one of these tags|"
    r"newer one|Remove it"
)


@dataclass
class Kept:
    """A run that has trained three steps, and its checkpoints after two and after three."""

    run: Run
    root: Path
    then: dict[str, Any]
    now: dict[str, Any]

    def put_back(self) -> None:
        self.run.engine.load_checkpoint(self.root / "now")
        assert_holds(self.run, self.now)


@pytest.fixture(scope="module")
def module_kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    root = tmp_path_factory.mktemp("damage")
    run = make_run(WIDTH, **FP16)
    run.train(2)
    run.engine.save_checkpoint(root / "then", client_state={"epoch": 1})
    then = run.held()
    run.train(1)
    run.engine.save_checkpoint(root / "now")
    yield Kept(run, root, then, run.held())
    time.sleep(0.5)  # let what is still being read end here


@pytest.fixture
def kept(module_kept: Kept) -> Kept:
    if module_kept.run.engine.global_steps != 3:
        module_kept.put_back()
    return module_kept


@pytest.fixture
def then(kept: Kept, tmp_path: Path) -> Path:
    """A copy of the earlier checkpoint, to damage."""
    return Path(shutil.copytree(kept.root / "then", tmp_path / "then"))


def check_refused(kept: Kept, path: Path, *match: Any, tag: str | None = None) -> None:
    """The error holds all of these and a repair; and nothing has changed."""
    with pytest.raises(CheckpointError, match=REPAIR) as caught:
        kept.run.engine.load_checkpoint(path, tag)
    for each in match:
        assert str(each) in str(caught.value)
    assert_holds(kept.run, kept.now)


def check_never_wrong(kept: Kept, path: Path) -> bool:
    """Refused with nothing changed, or loaded as it was saved. Returns whether it was refused."""
    found, failure = None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kept.run.engine.load_checkpoint(path)
    except CheckpointError as error:
        failure = str(error)
    if failure:
        assert str(path) in failure
        assert re.search(REPAIR, failure)
        assert_holds(kept.run, kept.now)
        return True
    assert found == (str(path / TAG), {"epoch": 1})
    assert_holds(kept.run, kept.then)
    kept.put_back()
    return False


def data_of(path: Path) -> Path:
    """The folder that the commit names."""
    return path / TAG / json.loads((path / TAG / "commit.json").read_text())["data"]


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


def must_be_refused(path: Path, damage: str) -> set[Path]:
    """The files that nothing else repeats.

    The commit, the index, and the one that holds most arrays.
    """
    folder = path / TAG
    largest = max(files_of(data_of(path) / "arrays"), key=lambda file: file.stat().st_size)
    # What one byte held may be used no longer.
    most = [] if damage in ("first", "inside", "last") else [largest]
    return {folder / "commit.json", data_of(path) / "index.json", *most}


def flip(content: bytes, place: int, bit: int = 0) -> bytes:
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def damaged(content: bytes, damage: str) -> bytes | None:
    """None: no file at all."""
    if damage in ("missing", "empty", "half"):
        return {"missing": None, "empty": b"", "half": content[: len(content) // 2]}[damage]
    if not content:
        return content
    third = len(content) // 3
    if damage == "middle":
        return (
            content[:third]
            + bytes(byte ^ 1 for byte in content[third : 2 * third])
            + content[2 * third :]
        )
    return flip(content, {"first": 0, "inside": third, "last": len(content) - 1}[damage])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", sweep(1, ["missing", "empty", "half", "middle", "first", "inside", "last"])
)
def test_each_file_damaged_in_turn(kept: Kept, then: Path, damage: str) -> None:
    refused: set[Path] = set()
    for file in files_of(then):
        content = file.read_bytes()
        file.unlink()
        changed = damaged(content, damage)
        if changed is not None:
            file.write_bytes(changed)
        if check_never_wrong(kept, then):
            refused.add(file)
        file.unlink(missing_ok=True)
        file.write_bytes(content)
    assert must_be_refused(then, damage) - refused == set()
    assert then / "latest" not in refused


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_random_damage(kept: Kept, then: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = files_of(then)
    for _ in range(400):
        file = rng.choice(files)
        content = file.read_bytes()
        place = rng.randrange(len(content) + 1)
        kinds = [content[:place], content + rng.randbytes(3), bytes(len(content))]
        kinds += [flip(content, place, rng.randrange(8)) for _ in range(4) if place < len(content)]
        file.write_bytes(rng.choice(kinds))
        check_never_wrong(kept, then)
        file.write_bytes(content)


def test_parameters_alone_of_damaged_arrays(then: Path) -> None:
    wanted = flatten_dict(load_params(then))
    refused = 0
    for file in files_of(data_of(then) / "arrays"):
        content = file.read_bytes()
        file.write_bytes(damaged(content, "inside") or b"")
        try:
            found = flatten_dict(load_params(then))
        except CheckpointError:
            refused += 1
        else:
            assert {key: leaf.tobytes() for key, leaf in found.items()} == {
                k: x.tobytes() for k, x in wanted.items()
            }
        file.write_bytes(content)
    assert refused > 0


@pytest.mark.parametrize("part", [".", "arrays", "arrays/d"])
def test_a_folder_is_missing_or_empty(kept: Kept, then: Path, part: str) -> None:
    data = data_of(then)
    shutil.rmtree(data / part)
    check_refused(kept, then, data)
    (data / part).mkdir()
    check_refused(kept, then, data)


LATEST = {
    "no-such-tag": b"global_step9",
    "folder-above": b"../now/global_step3",
    "own-folder": b"./global_step2",
    "absolute": b"/etc",
    "empty": b"",
    "zeros": bytes(12),
    "junk": bytes(range(1, 9)),
}


@pytest.mark.parametrize("content", LATEST.values(), ids=LATEST)
def test_latest_names_no_checkpoint(kept: Kept, then: Path, content: bytes) -> None:
    """As after a failed write of it: a job that starts again goes on from the newest one."""
    shutil.copytree(kept.root / "now", then.parent / "now")
    (then / "latest").write_bytes(content)
    check_loads_newest(kept, then)
    (then / TAG / "commit.json").unlink()
    with pytest.raises(CheckpointError, match=r"/latest must .* [Rr]emove"):
        kept.run.engine.load_checkpoint(then)


@pytest.mark.parametrize("kind", ["no-text", "folder"])
def test_latest_is_no_text(kept: Kept, then: Path, kind: str) -> None:
    (then / "latest").unlink()
    if kind == "folder":
        (then / "latest").mkdir()
    else:
        (then / "latest").write_bytes(b"\xff\xfe\x00")
    check_loads_newest(kept, then, "must be a readable text, but got .*. Remove it: the latest")


def check_loads_newest(kept: Kept, then: Path, match: str = "") -> None:
    with pytest.warns(UserWarning, match=f"{re.escape(str(then))}/latest .*{match}"):
        kept.run.engine.load_checkpoint(then)
    assert_holds(kept.run, kept.then)


def edit_commit(path: Path, **changed: Any) -> Path:
    file = path / TAG / "commit.json"
    content = {**json.loads(file.read_text()), **changed}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return file


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_a_version_that_is_not_known(kept: Kept, then: Path, version: Any) -> None:
    file = edit_commit(then, version=version, what_comes_later=[1])
    check_refused(
        kept,
        then,
        file,
        f"version={version!r}",
        "Open it with the release of jaxpipe that wrote it",
        tag=TAG,
    )


@pytest.mark.parametrize("name", ["torch", "", None])
def test_another_format(kept: Kept, then: Path, name: Any) -> None:
    file = edit_commit(then, format=name)
    check_refused(kept, then, file, f"format={name!r}", "'jaxpipe checkpoint'", tag=TAG)


@pytest.mark.parametrize(
    "data",
    [
        "../../etc",
        "/etc",
        "../global_step2/data-1",
        "data-1/../data-1",
        "data-1/",
        "data-",
        "",
        "data-1\n",
        1,
    ],
)
def test_data_elsewhere(kept: Kept, then: Path, data: Any) -> None:
    check_refused(kept, then, edit_commit(then, data=data), "restore the file", tag=TAG)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"data": "data-7-0a"},
            "data-7-0a/index.json must be readable, but got No such file or directory",
        ),
        ({"sequence": 0}, "sequence=0"),
        ({"sequence": "1"}, "sequence"),
        ({"index_sha256": "00"}, "restore the file"),
        ({"index_sha256": 64 * "0"}, "with sha256=000000000000..., but got "),
        ({"index_sha256": None}, "restore the file"),
        ({"sequence": ...}, "the entries data, index_sha256"),
        ({"extra": 1}, "the entries sequence, data"),
    ],
    ids=str,
)
def test_other_entries_of_the_commit(
    kept: Kept, then: Path, changed: dict[str, Any], match: str
) -> None:
    edit_commit(then, **changed)
    check_refused(kept, then, then / TAG, match, tag=TAG)


@pytest.mark.parametrize("content", [b"[]", b"3", b'"jaxpipe"', b"{}", b"null", b"{", b"\xff\xff"])
def test_a_commit_that_is_none(kept: Kept, then: Path, content: bytes) -> None:
    (then / TAG / "commit.json").write_bytes(content)
    check_refused(
        kept,
        then,
        then / TAG / "commit.json",
        f"{len(content)} bytes that are not a commit",
        tag=TAG,
    )


ODD: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "huge": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
}


@pytest.mark.parametrize("name", ["commit.json", "index.json", "latest", "arrays"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_file(kept: Kept, then: Path, make: Callable[[Path], Any], name: str) -> None:
    """It is refused at once, however long it could be read, and the other checkpoints are found."""
    shutil.copytree(kept.root / "now" / "global_step3", then / "global_step3")
    commit = then / TAG / "commit.json"
    if name == "arrays":
        file = next(
            each for each in files_of(data_of(then) / "arrays") if each.name == "manifest.ocdbt"
        )
    else:
        file = {"commit.json": commit, "index.json": data_of(then) / "index.json"}.get(
            name, then / name
        )
    file.unlink()
    make(file)
    shown = data_of(then) / "arrays" if name == "arrays" else file
    if name == "latest":
        with pytest.warns(UserWarning, match=f"Passed over: {re.escape(str(file))}"):
            kept.run.engine.load_checkpoint(then)
    else:
        check_refused(kept, then, shown, tag=TAG)
        kept.run.engine.load_checkpoint(then, "global_step3")
    assert_holds(kept.run, kept.now)


DEEP = {"lists": b"[" * 200_000, "dictionaries": b'{"a":' * 200_000, "digits": b"1" * 5000}


@pytest.mark.parametrize("content", DEEP.values(), ids=DEEP)
def test_a_commit_that_cannot_be_parsed_is_in_nobodys_way(
    kept: Kept, then: Path, content: bytes
) -> None:
    shutil.copytree(then / TAG, then / "best")
    (then / "best" / "commit.json").write_bytes(content)
    check_refused(
        kept,
        then,
        then / "best" / "commit.json",
        f"{len(content)} bytes that are not a commit",
        tag="best",
    )
    assert not check_passed_over(kept, then)
    kept.run.engine.save_checkpoint(then, "more")
    assert (then / "best" / "commit.json").read_bytes() == content
    (then / TAG / "commit.json").write_bytes(content)
    (then / "latest").write_text(TAG)
    check_refused(
        kept, then, then / TAG / "commit.json", f"{len(content)} bytes that are not a commit"
    )


def check_passed_over(kept: Kept, then: Path) -> bool:
    with pytest.warns(UserWarning, match="Passed over: .*best/commit.json must be a commit"):
        found = kept.run.engine.load_checkpoint(then)
    assert_holds(kept.run, kept.then)
    kept.put_back()
    return found != (str(then / TAG), {"epoch": 1})


@pytest.mark.parametrize("content", DEEP.values(), ids=DEEP)
def test_an_index_that_cannot_be_parsed(kept: Kept, then: Path, content: bytes) -> None:
    file = data_of(then) / "index.json"
    file.write_bytes(content)
    edit_commit(then, index_sha256=hashlib.sha256(content).hexdigest())
    check_refused(kept, then, file, "must be an index as save_checkpoint writes it")


ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    10**400,
    10**4200,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    "int32",
]
ODD_VALUES += [
    "float128",
    "object",
    "O",
    "../x",
    "\ud800",
    "9" * 5000,
    [],
    [[]],
    [1],
    [-1],
    [2**70],
    {},
    {"a": 1},
]
ODD_VALUES += [
    {"base64": 1},
    {"base64": "x"},
    {"base64": None},
    [None],
    {"shape": [1], "dtype": "float32"},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in a JSON value."""
    yield path
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        yield from places(each, (*path, key))


def mutated(content: Any, rng: random.Random) -> Any:
    """The same with one to three values replaced, removed, doubled, renamed or exchanged."""
    content = json.loads(json.dumps(content))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        everywhere = [path for path in places(content) if path]
        if not everywhere:
            return content
        parent = content
        # Of equally many kinds of places, as most are those of hashes.
        kind = rng.choice(
            sorted(
                {path[:1] + path[2:] if len(path) > 2 else path for path in everywhere}, key=repr
            )
        )
        *path, key = rng.choice(
            [p for p in everywhere if (p[:1] + p[2:] if len(p) > 2 else p) == kind]
        )
        for each in path:
            parent = parent[each]
        other = json.loads(json.dumps(rng.choice(ODD_VALUES)))
        match rng.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[str(other)[:50]] = parent.pop(key)
            case 2 if isinstance(parent, list):
                parent.insert(key, json.loads(json.dumps(parent[key])))
            case 3:
                parent[key] = [parent[key]]
            case _:
                parent[key] = other
    return content


def check_forged(kept: Kept, then: Path, rng: random.Random, num: int) -> int:
    """Every door answers with an error of the library, or with what may be there.

    Returns how many were refused.
    """
    file = data_of(then) / "index.json"
    index, commit = (
        json.loads(file.read_text()),
        json.loads((then / TAG / "commit.json").read_text()),
    )
    num_refused = 0
    for _ in range(num):
        if rng.random() < 0.85:
            file.write_text(json.dumps(mutated(index, rng)))
            edit_commit(then, index_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        else:
            (then / TAG / "commit.json").write_text(json.dumps(mutated(commit, rng)))
        refused = [answers(door, then) for door in DOORS]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                kept.run.engine.load_checkpoint(then, TAG)
            kept.put_back()
        except (CheckpointError, DataError):
            refused.append(False)
            assert_holds(kept.run, kept.now)
        num_refused += not all(refused)
        file.write_text(json.dumps(index))
        (then / TAG / "commit.json").write_text(json.dumps(commit))
        edit_commit(then, index_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
        commit = json.loads((then / TAG / "commit.json").read_text())
    return num_refused


DOORS: list[Callable[[Path], Any]] = [
    load_params,
    load_collections,
    inspect_checkpoint,
    verify_checkpoint,
    lambda path: export_safetensors(path, path / "out.safetensors"),
]


def answers(door: Callable[[Path], Any], path: Path) -> bool:
    try:
        door(path)
    except CheckpointError:
        return False
    return True


def test_forged_indices_and_commits(kept: Kept, then: Path) -> None:
    """Whose hashes agree, as somebody wrote them on purpose."""
    assert check_forged(kept, then, random.Random(0), 40) > 10


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_forged_indices_and_commits(kept: Kept, then: Path, seed: int) -> None:
    assert check_forged(kept, then, random.Random(seed), 100) > 40


def edit_index(path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Edit the index and commit it anew."""
    file = data_of(path) / "index.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    edit_commit(path, index_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    return file


def span_of(index: dict[str, Any]) -> dict[str, Any]:
    return index["leaves"]["params/layers/0_Averaging/Dense_0/kernel"]["spans"][0]


def last_span_of(index: dict[str, Any]) -> dict[str, Any]:
    """The one that begins farthest behind."""
    spans = [span for leaf in index["leaves"].values() for span in leaf["spans"]]
    return max(spans, key=lambda span: span["start"])


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "row": lambda index: span_of(index).update(rows=[2]),
    "row-below-zero": lambda index: span_of(index).update(rows=[-1]),
    "start": lambda index: span_of(index).update(start=-1),
    "stop": lambda index: span_of(index).update(stop=10**9),
    "backwards": lambda index: span_of(index).update(start=7, stop=3),
    "short": lambda index: span_of(index).update(stop=span_of(index)["start"] + 1),
    "short-at-the-end": lambda index: last_span_of(index).update(
        stop=last_span_of(index)["start"] + 1
    ),
    "array": lambda index: span_of(index).update(array="no/such/array"),
    "no-spans-entry": lambda index: span_of(index).pop("stop"),
    "no-arrays": lambda index: index.pop("arrays"),
    "no-steps": lambda index: index.pop("global_steps"),
    "no-list": lambda index: index.update(leaves=[1]),
    "adapter": lambda index: index.update(adapters=list(index["leaves"])[:1]),
    "excluded": lambda index: index.update(excluded=list(index["leaves"])[:1]),
    "hashes": lambda index: index["arrays"]["params/packed/float32"].update(
        sha256=[0 for _ in index["arrays"]["params/packed/float32"]["sha256"]]
    ),
    "dtype": lambda index: index["leaves"]["params/layers/0_Averaging/Dense_0/kernel"].update(
        dtype="int32"
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_index_that_contradicts_itself(
    kept: Kept, then: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    file = edit_index(then, edit)
    check_refused(kept, then, file, "must be an index as save_checkpoint writes it")


def test_the_index_describes_other_arrays(kept: Kept, then: Path) -> None:
    """What the arrays are read as is checked by their content."""

    def swap(index: dict[str, Any]) -> None:
        sums = index["arrays"]["params/packed/float32"]["sha256"]
        sums.reverse()

    edit_index(then, swap)
    check_refused(kept, then, data_of(then) / "arrays", "params/packed/float32", "another sha256")


OTHER_MODELS: dict[str, Callable[[], Run]] = {
    "narrower": lambda: make_run(WIDTH - 1, **FP16),
    "more-layers": lambda: make_run(
        0, *(LayerSpec(Averaging, WIDTH), LayerSpec(nn.Dense, 3), LayerSpec(nn.Dense, 1))
    ),
    "other-layers": lambda: make_run(0, LayerSpec(nn.Dense, WIDTH), LayerSpec(nn.Dense, 1)),
    "sgd": lambda: make_run(
        WIDTH, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    ),
    "lion": lambda: make_run(WIDTH, optimizer={"type": "Lion", "params": {"lr": 0.1}}),
}
DIFFERENCES = {
    "narrower": (
        "of another shape: layers/0_Averaging/Dense_0/bias (float32[1500], not float32[1499])",
        "load what fits with load_module_strict=False",
    ),
    "more-layers": ("missing: layers/2_Dense", "load what fits with load_module_strict=False"),
    "other-layers": (
        "missing: layers/0_Dense; unexpected: layers/0_Averaging",
        "Build the model from the same layers",
    ),
    "sgd": (
        "must hold the state of the optimizer in use",
        "unexpected",
        "load_optimizer_states=False",
    ),
    "lion": (
        "must hold the state of the optimizer in use",
        "unexpected",
        "load_optimizer_states=False",
    ),
}


@pytest.mark.parametrize("other", sweep(2, [*OTHER_MODELS]))
def test_a_checkpoint_of_another_model_or_optimizer(kept: Kept, other: str) -> None:
    run = OTHER_MODELS[other]()
    next(run.data)
    before = run.held()
    with pytest.raises(CheckpointError) as caught:
        run.engine.load_checkpoint(kept.root / "then")
    for each in (str(kept.root / "then" / TAG), *DIFFERENCES[other]):
        assert each in str(caught.value)
    assert_holds(run, before)


def test_a_place_in_data_of_another_kind(kept: Kept) -> None:
    """The data's own error; nothing has changed."""
    own = kept.run.data
    samples = [tuple(leaf[0] for leaf in entry(seed)) for seed in range(6)]
    other = RepeatingLoader(BatchLoader(samples, 2, seed=0))
    kept.run.engine.set_dataiterator(other)
    kept.run.data = other
    next(other)
    before = kept.run.held()
    try:
        with pytest.raises(
            DataError,
            match="but got state={'position': 4} and loader=<BatchLoader>. Pass the loader",
        ):
            kept.run.engine.load_checkpoint(kept.root / "then")
        assert_holds(kept.run, before)
    finally:
        kept.run.data = own
        kept.run.engine.set_dataiterator(own)
    assert_holds(kept.run, kept.now)


@pytest.mark.slow
def test_a_load_that_fails_leaves_the_next_iterator_alone(kept: Kept, then: Path) -> None:
    """Where each batch has its own iterator, a fresh one begins at its first entry.

    As without the load.
    """
    engine = make_engine()
    first, second = (RepeatingLoader([entry(seed) for seed in range(6)]) for _ in range(2))
    engine.train_batch(first)
    with pytest.raises(CheckpointError, match="load what fits with load_module_strict=False"):
        engine.load_checkpoint(then)
    engine.train_batch(second)
    assert second.get_state() == {"position": 2}
