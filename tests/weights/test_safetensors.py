"""Safetensors files read back in, and what is none."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from _disk_store import DiskStore
from _no_descriptors import no_descriptors
from safetensors.numpy import save_file

from jaxpipe._paths import any_path
from jaxpipe.errors import CheckpointError
from jaxpipe.weights import load_safetensors
from jaxpipe.weights._safetensors import safetensors_files


def write_header(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def two_shards(folder: Path, **weight_map: str) -> Path:
    """Shards `m-1` with the tensor `a` and `m-2` with `b`.

    The index may say something else.
    """
    for shard, name in (("m-1", "a"), ("m-2", "b")):
        save_file({name: np.zeros(2, np.float32)}, folder / f"{shard}.safetensors")
    index = folder / "m.safetensors.index.json"
    listed = {"a": "m-1.safetensors", "b": "m-2.safetensors", **weight_map}
    index.write_text(json.dumps({"metadata": {"total_size": 16}, "weight_map": listed}))
    return index


Load = Callable[..., dict[str, Any]]


@pytest.fixture(params=["file system", "store"])
def load(request: pytest.FixtureRequest) -> Load:
    """Reads what is at a path on this disk, by that path or by its URL on a store."""
    if request.param == "file system":
        return load_safetensors
    return lambda path, *part: load_safetensors(f"{DiskStore.protocol}://{path}", *part)


def test_files_from_elsewhere_are_read(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {
        "model.embed": np.ones((2, 1), np.float32),
        "a/b": np.array(3, np.int64),
        "a/c": np.zeros((0, 2), bool),
    }
    save_file(tensors, path)
    wanted = {
        "model.embed": tensors["model.embed"],
        "a": {"b": tensors["a/b"], "c": tensors["a/c"]},
    }
    chex.assert_trees_all_equal(load(path), wanted, strict=True)
    assert load(path, "collections") == {}
    zeros = {name: np.zeros(2, np.float32) for name in "ab"}
    chex.assert_trees_all_equal(load(two_shards(tmp_path)), zeros, strict=True)


def test_the_part_has_a_name(load: Load, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"'params' or 'collections', but got part='opt_state'\. Write one"
    ):
        load(tmp_path, "opt_state")  # pyright: ignore[reportArgumentType]


def test_a_name_cannot_hold_others(load: Load, tmp_path: Path) -> None:
    save_file(
        {"a/b": np.zeros(1), "a": np.zeros(1), "a/b/c": np.zeros(1)}, tmp_path / "m.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"paths in a tree, but got 'a' and 'a/b'\. Rename the first"
    ):
        load(tmp_path)


def test_a_name_has_no_end_of_parts(load: Load, tmp_path: Path) -> None:
    for name in ("x" + "/x" * 100_000, "/" * 200_000):
        write_header(tmp_path / "m.safetensors", {name: FLOAT}, b"four")
        with pytest.raises(
            CheckpointError,
            match=r"paths of at most 100 parts, but got .* characters\) of \d+\. Rename",
        ):
            load(tmp_path)


FLOAT = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
FLOAT8 = {"x": {"dtype": "F8_E5M2", "shape": [1], "data_offsets": [0, 1]}}
SHORT = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
TWICE = {
    "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    "y": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("something else entirely"),
        lambda path: write_header(path, SHORT, b"four"),
        lambda path: write_header(path, TWICE, b"1"),
        lambda path: write_header(path, FLOAT8, b"1"),
    ],
    ids=["missing", "folder", "empty", "text", "truncated", "overlapping", "float8"],
)
def test_what_is_no_safetensors_file_is_named(
    load: Load, tmp_path: Path, write: Callable[[Path], Any]
) -> None:
    path = tmp_path / "m-00001-of-00001.safetensors"
    write(path)
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": path.name}}))
    if path.is_file():
        with pytest.raises(
            CheckpointError,
            match=rf"{path.name} must be a safetensors file .* restore it, or export",
        ):
            load(path)
        with pytest.raises(
            CheckpointError,
            match=rf"{path.name} must be a safetensors file .* restore it, or export",
        ):
            load(tmp_path)
    else:
        with pytest.raises(
            CheckpointError,
            match=rf"\['x'\]='{path.name}', which is missing\. Restore it, or export",
        ):
            load(tmp_path)


def test_a_missing_file_is_named(load: Load, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"none\.safetensors must be a safetensors file .*FileNotFound.* restore",
    ):
        load(tmp_path / "none.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"index\.json must be a readable file, but got (No such|nothing is there).* restore",
    ):
        load(tmp_path / "none.safetensors.index.json")


@pytest.mark.parametrize("names", [[], ["a.safetensors", "b.safetensors"]], ids=["none", "two"])
def test_a_folder_must_hold_one(load: Load, tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save_file({"x": np.zeros(1)}, tmp_path / name)
    with pytest.raises(
        CheckpointError,
        # A folder without a file in it is not there on a store.
        match=rf"with {', '.join(names) or 'none'}\. Pass the path of the file itself|nothing is",
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        "\ud8ff",
    ],
    ids=["cut", "list", "other", "empty", "no map", "numbers", "bytes"],
)
def test_an_index_that_is_none_is_named(load: Load, tmp_path: Path, text: str) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(
        CheckpointError, match=r"index\.json must be the index of shards.* Pass <name>\.safetensors"
    ):
        load(index)


@pytest.mark.parametrize(
    "shard",
    [
        "../m-1.safetensors",
        "/etc/passwd",
        "sub/m-1.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "m-1.bin",
    ],
)
def test_shards_lie_beside_their_index(load: Load, tmp_path: Path, shard: str) -> None:
    index = two_shards(tmp_path, a=shard)
    named = rf"its own folder, but got weight_map\['a'\]={re.escape(repr(shard))}\. Write its"
    with pytest.raises(CheckpointError, match=named):
        load(index)


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "m-2.safetensors"}, "'a' at m-2.safetensors, while it is in no shard."),
        ({"c": "m-1.safetensors"}, "'c' at m-1.safetensors, while it is in no shard."),
        (
            {"a": "m-2.safetensors", "b": "m-1.safetensors"},
            "'a' at m-2.safetensors, while it is in m-1.safetensors.",
        ),
    ],
    ids=["lost", "unknown", "swapped"],
)
def test_an_index_must_agree_with_its_shards(
    load: Load, tmp_path: Path, weight_map: dict[str, str], named: str
) -> None:
    with pytest.raises(
        CheckpointError, match=re.escape(named) + r" The files are not of one export"
    ):
        load(two_shards(tmp_path, **weight_map))


def test_a_tensor_must_be_in_one_shard(load: Load, tmp_path: Path) -> None:
    index = two_shards(tmp_path)
    save_file(
        {"b": np.zeros(2, np.float32), "a": np.ones(2, np.float32)}, tmp_path / "m-2.safetensors"
    )
    with pytest.raises(
        CheckpointError,
        match=r"'a' in both m-1\.safetensors and m-2\.safetensors\. .* export again",
    ):
        load(index)
    save_file(
        {"b": np.zeros(2, np.float32), "c": np.ones(2, np.float32)}, tmp_path / "m-2.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"'c' at no place, while it is in m-2\.safetensors\. .* export again"
    ):
        load(index)


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
REFUSED: dict[str, Any] = {
    "more than memory": {"a": {**ENTRY, "shape": [1 << 41], "data_offsets": [0, 1 << 43]}},
    "more than the offsets": {"a": {**ENTRY, "shape": [1 << 36]}},
    "too large to count": {"a": {**ENTRY, "shape": [1 << 62, 4]}},
    "numbers as metadata": {"a": ENTRY, "__metadata__": {"b": 1}},
    "list as metadata": {"a": ENTRY, "__metadata__": []},
    "half of a letter": {"\ud800": ENTRY},
    "no number": {"a": ENTRY, "__metadata__": {"b": float("nan")}},
    "three offsets": {"a": {**ENTRY, "data_offsets": [0, 16, 16]}},
    "negative shape": {"a": {**ENTRY, "shape": [-4, -1]}},
    "truth as shape": {"a": {**ENTRY, "shape": [True, 4]}},
    "backwards": {"a": {**ENTRY, "data_offsets": [16, 0]}},
}


@pytest.mark.parametrize("header", REFUSED.values(), ids=REFUSED)
def test_a_header_is_refused_as_the_library_refuses_it(
    load: Load, tmp_path: Path, header: dict[str, Any]
) -> None:
    """On a store too, where the library cannot open the file."""
    path = write_header(tmp_path / "x.safetensors", header, bytes(16))
    with pytest.raises(CheckpointError, match="but got SafetensorError: Error while deserializing"):
        load(path)


def test_a_tensor_without_room_in_memory(tmp_path: Path) -> None:
    """The library panics there, which is no `Exception`."""
    header = REFUSED["more than memory"]
    path = write_header(tmp_path / "x.safetensors", header, b"")
    os.truncate(path, path.stat().st_size + (1 << 43))  # of holes
    with pytest.raises(CheckpointError, match="must hold tensors that fit into this machine's mem"):
        load_safetensors(path)


def test_requests_do_not_grow_with_the_names(tmp_path: Path) -> None:
    def requests(num_names: int) -> int:
        names = [f"{i}" for i in range(num_names)]
        save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "m-1.safetensors")
        save_file({"last": np.zeros(2, np.float32)}, tmp_path / "m-2.safetensors")
        weight_map = {name: "m-1.safetensors" for name in names} | {"last": "m-2.safetensors"}
        index = tmp_path / "m.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with DiskStore.hooked(None):
            safetensors_files(any_path(f"disk://{index}", "path"))
            return DiskStore.number

    assert requests(100) == requests(2) < 15


def test_no_free_descriptor_is_said(tmp_path: Path) -> None:
    """Not that the file is missing, as the library says."""
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")
    with no_descriptors(), pytest.raises(CheckpointError, match="Too many open .* 'ulimit -n"):
        load_safetensors(tmp_path / "x.safetensors")
