"""Checkpoints out to safetensors files, and parameters back in, to the bit."""

import functools
import json
import re
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused
from _saved import change_index, copied, flip, make_engine, saved, trained
from safetensors import safe_open

from jaxpipe.checkpoint import export_safetensors, load_collections, load_params
from jaxpipe.core.state import state_arrays
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict
from jaxpipe.weights import load_safetensors

LIMIT = 3000
NAMES = {
    *(
        "tied/io/bias",
        "tied/io/kernel",
        "layers/1_Dense/bias",
        "layers/1_Dense/kernel",
        "layers/2_Dense/bias",
    ),
    *("layers/2_Dense/kernel", "layers/3_Half/Dense_0/bias", "layers/3_Half/Dense_0/kernel"),
    "collections/3_Half/batch_stats/seen",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors")


def assert_same(actual: Any, wanted: Any) -> None:
    """The same bits at the same places."""
    actual, wanted = flatten_dict(actual), flatten_dict(wanted)
    assert set(actual) == set(wanted)
    for path, value in wanted.items():
        assert (actual[path].dtype, actual[path].shape) == (value.dtype, value.shape), path
        assert actual[path].tobytes() == np.asarray(value).tobytes(), path


def read_index(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_one_file_holds_what_the_engine_held(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "model.safetensors"
    assert export_safetensors(saved(root), out) == [out]
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]
    with safe_open(out, framework="numpy") as file:
        assert set(file.keys()) == NAMES
        assert file.metadata() == {"format": "jaxpipe", "global_steps": "1"}
        assert file.get_tensor("layers/1_Dense/kernel").dtype == jnp.bfloat16
        assert file.get_tensor("layers/3_Half/Dense_0/kernel").dtype == np.float16
    params, collections = load_safetensors(out), load_safetensors(out, "collections")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((params, collections)))
    assert_same(params, trained().module_state_dict())
    assert_same(params, load_params(saved(root)))
    assert_same(collections, trained().module_collections())
    assert_same(collections, load_collections(saved(root)))


def test_tensors_are_aligned(root: Path, tmp_path: Path) -> None:
    export_safetensors(saved(root), tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    for name in NAMES:
        assert (
            header[name]["data_offsets"][0] % {"F32": 4, "I32": 4}.get(header[name]["dtype"], 2)
            == 0
        )


def test_shards_have_the_form_of_hugging_face(root: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    export_safetensors(saved(root), whole)
    target = tmp_path / "shards" / "model.safetensors"
    *shards, index = export_safetensors(saved(root), target, "global_step1", max_shard_bytes=LIMIT)
    count = len(shards)
    assert count > 2
    assert [path.name for path in shards] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    assert index.name == "model.safetensors.index.json"
    assert set(target.parent.iterdir()) == {*shards, index}
    content = read_index(index)
    leaves = [
        *jax.tree.leaves(load_params(saved(root))),
        *jax.tree.leaves(load_collections(saved(root))),
    ]
    assert content["metadata"] == {"total_size": sum(leaf.nbytes for leaf in leaves)}
    held = {}
    for path in shards:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            assert file.metadata() == {"format": "jaxpipe", "global_steps": "1"}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= LIMIT or len(tensors) == 1
        held |= dict.fromkeys(tensors, path.name)
    assert content["weight_map"] == held
    assert set(held) == NAMES
    for path in (index, index.parent):
        assert_same(load_safetensors(path), load_safetensors(whole))
        assert_same(load_safetensors(path, "collections"), load_safetensors(whole, "collections"))


def test_what_fits_in_one_file_is_one_file(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert export_safetensors(saved(root), out, max_shard_bytes=10**6) == [out]
    assert_same(load_safetensors(tmp_path), load_safetensors(out))


def test_other_engines_take_the_parameters_and_export_the_same_bytes(
    root: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first.safetensors"
    export_safetensors(saved(root), first)
    params, collections = load_safetensors(first), load_safetensors(first, "collections")
    engine = make_engine(1, 1, model_parameters=params)
    assert_same(engine.module_state_dict(), params)
    engine.load_module_state_dict(jax.tree.map(np.zeros_like, params))
    engine.load_module_state_dict(params, collections=collections)
    assert_same(engine.module_state_dict(), params)
    assert_same(engine.module_collections(), collections)
    engine.load_checkpoint(saved(root))
    engine.save_checkpoint(tmp_path / "again")
    second = tmp_path / "second.safetensors"
    export_safetensors(tmp_path / "again", second)
    assert second.read_bytes() == first.read_bytes()


def test_an_earlier_export_is_replaced(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"old")
    export_safetensors(saved(root), out)
    assert_same(load_safetensors(out), load_params(saved(root)))
    target = tmp_path / "shards" / "model.safetensors"
    *shards, index = export_safetensors(saved(root), target, max_shard_bytes=LIMIT)
    for path in (*shards, index):
        path.write_bytes(b"old")
    export_safetensors(saved(root), target, max_shard_bytes=LIMIT)
    assert set(target.parent.iterdir()) == {*shards, index}
    assert_same(load_safetensors(index), load_params(saved(root)))


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["whole", "shards"])
def test_nothing_is_written_through_a_link(root: Path, tmp_path: Path, limit: int | None) -> None:
    own, folder = tmp_path / "own", tmp_path / "shared"
    own.write_text("years of work")
    folder.mkdir()
    target = folder / "m.safetensors"
    written = export_safetensors(saved(root), target, max_shard_bytes=limit)
    for path in written:
        for name in (
            path.name,
            path.name + ".partial",
            f".{path.name}.partial",
            f".{path.name}.writing",
        ):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(own)
    lock = folder / f".{target.name}.writing"
    if lock.is_symlink():
        with pytest.raises(CheckpointError, match="is a link, through which nothing is written"):
            export_safetensors(saved(root), target, max_shard_bytes=limit)
        lock.unlink()
    export_safetensors(saved(root), target, max_shard_bytes=limit)
    assert own.read_text() == "years of work"
    assert not any(path.is_symlink() for path in written)
    assert_same(load_safetensors(written[-1]), load_params(saved(root)))


def test_what_a_killed_export_left_is_removed(root: Path, tmp_path: Path) -> None:
    (tmp_path / f".m-00001-of-00002.safetensors.{'0a' * 8}.partial").write_bytes(b"half")
    other = tmp_path / f".n.safetensors.{'0a' * 8}.partial"
    other.write_bytes(b"of another export")
    out = tmp_path / "m.safetensors"
    export_safetensors(saved(root), out)
    assert set(tmp_path.iterdir()) == {out, other}


@pytest.mark.parametrize("limit", [None, LIMIT], ids=["whole", "shards"])
def test_a_damaged_checkpoint_leaves_an_earlier_export_alone(
    root: Path, tmp_path: Path, limit: int | None
) -> None:
    out = tmp_path / "out" / "model.safetensors"
    written = export_safetensors(saved(root), out, max_shard_bytes=limit)
    before = {path: path.read_bytes() for path in written}
    path = copied(root, tmp_path)
    flip(path, np.asarray(state_arrays(trained().state)["params/stacked/tied/io/kernel"])[0])
    for target in (out, tmp_path / "empty" / "model.safetensors"):
        with pytest.raises(
            CheckpointError, match=r"tied/io/kernel has another sha256 .* restore the files"
        ):
            export_safetensors(path, target, max_shard_bytes=limit)
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    ("other", "limit"),
    [
        ("m.safetensors", LIMIT),
        ("m.safetensors.index.json", None),
        ("m-00001-of-00099.safetensors", None),
    ],
    ids=["file", "index", "shard"],
)
def test_exports_in_other_files_are_not_mixed(
    root: Path, tmp_path: Path, other: str, limit: int | None
) -> None:
    (tmp_path / other).write_bytes(b"other")
    (tmp_path / "m-large.safetensors").write_bytes(b"of another name")
    with pytest.raises(
        CheckpointError,
        match=rf"m\.safetensors' next to {re.escape(other)}\. Remove these files, or choose",
    ):
        export_safetensors(saved(root), tmp_path / "m.safetensors", max_shard_bytes=limit)
    assert (tmp_path / other).read_bytes() == b"other"
    assert len(list(tmp_path.iterdir())) == 2


def test_dtypes_that_safetensors_has_not_are_named(root: Path, tmp_path: Path) -> None:
    def as_complex(index: dict[str, Any]) -> None:
        leaf = index["leaves"]["collections/3_Half/batch_stats/seen"]
        leaf["dtype"] = index["arrays"][leaf["spans"][0]["array"]]["dtype"] = "complex64"

    path = copied(root, tmp_path)
    change_index(path / "global_step1", as_complex)
    named = (
        r"'collections/3_Half/batch_stats/seen' of dtype=complex64\. Read it with load_params and "
        r"convert it"
    )
    with pytest.raises(CheckpointError, match=named):
        export_safetensors(path, tmp_path / "m.safetensors")


def test_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    export = functools.partial(export_safetensors, saved(root))
    table = [
        *(
            (
                rf"'\.safetensors', but got out='.*{re.escape(name)}'\. Write "
                rf".*{re.escape(example)}\.safetensors'",
                functools.partial(export, tmp_path / name),
            )
            for name, example in (
                ("model", "model"),
                ("model.bin", "model.bin"),
                (".safetensors", ".safetensors"),
                ("", "/model"),
            )
        ),
        (
            r"out='.*file/m\.safetensors' and (File exists|Not a dir).* Make room",
            functools.partial(export, tmp_path / "file" / "m.safetensors"),
        ),
        (
            r"at least 1, but got max_shard_bytes=0\. Write .* None for one file",
            functools.partial(export, tmp_path / "m.safetensors", max_shard_bytes=0),
        ),
        (
            r"and no checkpoint\. Pass the directory",
            functools.partial(export_safetensors, tmp_path, tmp_path / "m.safetensors"),
        ),
    ]
    check_refused(CheckpointError, table)
