"""Safetensors files read back in, and what is none."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _disk_store import DiskStore
from _no_descriptors import no_descriptors
from _refusals import check_refused
from safetensors.numpy import save_file

from jaxpipe._util.paths import any_path
from jaxpipe.errors import CheckpointError
from jaxpipe.weights import load_safetensors, write_safetensors
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


def saved(folder: Path, **files: str) -> Path:
    """A folder of files, each with a tensor for every word."""
    for file, names in files.items():
        tensors = {name: np.zeros(2, np.float32) for name in names.split()}
        save_file(tensors, folder / f"{file}.safetensors")
    return folder


def index_of(folder: Path, text: str) -> Path:
    index = folder / "m.safetensors.index.json"
    index.write_bytes(text.encode("utf-8", "surrogatepass"))
    return index


def indexed(folder: Path, write: Callable[[Path], object]) -> Path:
    """The only shard of an index, as it is written."""
    path = folder / "m-00001-of-00001.safetensors"
    write(path)
    index_of(folder, json.dumps({"weight_map": {"x": path.name}}))
    return path


def tensor(dtype: str, shape: list[Any], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


BYTE, FOUR = tensor("U8", [1], 0, 1), tensor("F32", [4], 0, 16)
NO_FILES: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_text("something else entirely"),
    lambda path: write_header(path, {"x": tensor("F32", [2], 0, 8)}, b"four"),
    lambda path: write_header(path, {"x": BYTE, "y": BYTE}, b"1"),
    lambda path: write_header(path, {"x": tensor("F8_E5M2", [1], 0, 1)}, b"1"),
]
NO_HEADERS: dict[str, dict[str, Any]] = {
    "more than memory": {"a": tensor("F32", [1 << 41], 0, 1 << 43)},
    "more than the offsets": {"a": tensor("F32", [1 << 36], 0, 16)},
    "too large to count": {"a": tensor("F32", [1 << 62, 4], 0, 16)},
    "numbers as metadata": {"a": FOUR, "__metadata__": {"b": 1}},
    "list as metadata": {"a": FOUR, "__metadata__": []},
    "half of a letter": {"\ud800": FOUR},
    "no number": {"a": FOUR, "__metadata__": {"b": float("nan")}},
    "three offsets": {"a": tensor("F32", [4], 0, 16, 16)},
    "negative shape": {"a": tensor("F32", [-4, -1], 0, 16)},
    "truth as shape": {"a": tensor("F32", [True, 4], 0, 16)},
    "backwards": {"a": tensor("F32", [4], 16, 0)},
}
"""Which the library refuses; on a store, where it cannot open the file, they are refused alike."""
REFUSED: list[tuple[str, Callable[[Load, Path], object]]] = [
    (
        r"'params' or 'collections', but got part='opt_state'\. Write one",
        lambda load, at: load(at, "opt_state"),
    ),
    (
        r"paths in a tree, but got 'a' and 'a/b'\. Rename the first",
        lambda load, at: load(saved(at, m="a/b a a/b/c")),
    ),
    *(
        (
            r"paths of at most 100 parts, but got .* characters\) of \d+\. Rename",
            lambda load, at, name=name: load(
                write_header(at / "m.safetensors", {name: tensor("F32", [1], 0, 4)}, b"four").parent
            ),
        )
        for name in ("x" + "/x" * 100_000, "/" * 200_000)
    ),
    *(
        (
            r"m-00001-of-00001\.safetensors must be a safetensors file .* restore it, or export",
            lambda load, at, write=write, up=up: load(
                [path := indexed(at, write), path.parent][up]
            ),
        )
        for write in NO_FILES
        for up in (False, True)
    ),
    *(
        (
            r"\['x'\]='m-00001-of-00001\.safetensors', which is missing\. Restore it, or export",
            lambda load, at, write=write: load(indexed(at, write).parent),
        )
        for write in (lambda path: None, Path.mkdir)
    ),
    (
        r"none\.safetensors must be a safetensors file .*FileNotFound.* restore",
        lambda load, at: load(at / "none.safetensors"),
    ),
    (
        r"index\.json must be a readable file, but got (No such|nothing is there).* restore",
        lambda load, at: load(at / "none.safetensors.index.json"),
    ),
    # A folder without a file in it is not there on a store.
    (
        r"with none\. Pass the path of the file itself|nothing is",
        lambda load, at: load(at),
    ),
    (
        r"with a\.safetensors, b\.safetensors\. Pass the path of the file itself",
        lambda load, at: load(saved(at, a="x", b="x")),
    ),
    *(
        (
            r"index\.json must be the index of shards.* Pass <name>\.safetensors",
            lambda load, at, text=text: load(index_of(at, text)),
        )
        for text in (
            *("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'),
            *('{"weight_map": {"a": 1}}', "\ud8ff"),
        )
    ),
    *(
        (
            rf"its own folder, but got weight_map\['a'\]={re.escape(repr(shard))}\. Write its",
            lambda load, at, shard=shard: load(two_shards(at, a=shard)),
        )
        for shard in (
            *("../m-1.safetensors", "/etc/passwd", "sub/m-1.safetensors", "..", ""),
            *("a\\b.safetensors", "m-1.bin"),
        )
    ),
    *(
        (
            rf"{lost}, while it is in {found}\. The files are not of one export",
            lambda load, at, listed=listed: load(two_shards(at, **listed)),
        )
        for listed, lost, found in (
            ({"a": "m-2.safetensors"}, r"'a' at m-2\.safetensors", "no shard"),
            ({"c": "m-1.safetensors"}, r"'c' at m-1\.safetensors", "no shard"),
            (
                {"a": "m-2.safetensors", "b": "m-1.safetensors"},
                *(r"'a' at m-2\.safetensors", r"m-1\.safetensors"),
            ),
        )
    ),
    (
        r"'a' in both m-1\.safetensors and m-2\.safetensors\. .* export again",
        lambda load, at: load([two_shards(at), saved(at, **{"m-2": "b a"})][0]),
    ),
    (
        r"'c' at no place, while it is in m-2\.safetensors\. .* export again",
        lambda load, at: load([two_shards(at), saved(at, **{"m-2": "b c"})][0]),
    ),
    *(
        (
            "but got SafetensorError: Error while deserializing",
            lambda load, at, header=header: load(
                write_header(at / "x.safetensors", header, bytes(16))
            ),
        )
        for header in NO_HEADERS.values()
    ),
]


def test_refused(load: Load, tmp_path: Path) -> None:
    for number, row in enumerate(REFUSED):
        folder = tmp_path / str(number)
        folder.mkdir()
        check_refused(CheckpointError, [row], load, folder)


def test_a_tensor_without_room_in_memory(tmp_path: Path) -> None:
    """The library panics there, which is no `Exception`."""
    header = NO_HEADERS["more than memory"]
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


def write(folder: Path, limit: int | None, **tensors: np.ndarray) -> dict[str, list[str]]:
    """Write tensors to `m.safetensors` or its shards; gives the names in each file."""
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tensors.items()}
    target = folder / "m.safetensors"
    paths = write_safetensors(folder, target, structs, tensors.items(), {"a": "b"}, limit)
    files = [path for path in paths if path.name.endswith(".safetensors")]
    return {path.name: sorted(load_safetensors(path)) for path in files}


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """A header, and where the tensors begin."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), 8 + length


@pytest.mark.parametrize(
    ("limit", "shards"),
    [
        (None, ["abcd"]),
        (24, ["abcd"]),
        (23, ["abc", "d"]),
        (16, ["ab", "cd"]),
        (8, ["a", "b", "cd"]),
        (1, ["a", "b", "c", "d"]),
    ],
)
def test_shards_are_filled_up_to_their_limit(
    limit: int | None, shards: list[str], tmp_path: Path
) -> None:
    """Tensors of 8, 8, 4 and 4 bytes; one that is too large for any is alone."""
    sizes = {"a": 2, "b": 2, "c": 1, "d": 1}
    tensors = {name: np.full(size, size, np.float32) for name, size in sizes.items()}
    count = len(shards)
    names = [f"m-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    names = ["m.safetensors"] if count == 1 else names
    assert write(tmp_path, limit, **tensors) == dict(zip(names, map(list, shards), strict=True))
    if count > 1:
        index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 24}
        assert index["weight_map"] == {
            letter: name for name, letters in zip(names, shards, strict=True) for letter in letters
        }


def test_every_tensor_begins_at_a_multiple_of_its_items(tmp_path: Path) -> None:
    for more in range(8):  # headers of all lengths
        folder = tmp_path / str(more)
        tensors = {
            "a" * (more + 1): np.array([1, 2, 3], np.int8),
            "b": np.array([1.5], jnp.bfloat16),
            "c": np.array([1, 2], np.float64),
            "d": np.array([1], np.int32),
        }
        write(folder, None, **tensors)
        header, begin = header_of(folder / "m.safetensors")
        assert begin % 8 == 0
        assert header.pop("__metadata__") == {"a": "b"}
        for name, entry in header.items():
            assert entry["data_offsets"][0] % tensors[name].dtype.itemsize == 0, name
        ends = sorted(entry["data_offsets"] for entry in header.values())
        assert [*(start for start, _ in ends), 25] == [0, *(stop for _, stop in ends)]


def test_a_folder_s_model_is_preferred(load: Load, tmp_path: Path) -> None:
    """Before the index of its shards, and both before anything else."""
    for name in ("adapter", "model-00001-of-00001", "other-00001-of-00001"):
        saved(tmp_path, **{name: name})
    index = tmp_path / "model.safetensors.index.json"
    shard = "model-00001-of-00001"
    index.write_text(json.dumps({"weight_map": {shard: f"{shard}.safetensors"}}))
    assert list(load(tmp_path)) == [shard]
    saved(tmp_path, model="whole")
    assert list(load(tmp_path)) == ["whole"]


def test_shards_without_their_index_are_no_model(load: Load, tmp_path: Path) -> None:
    saved(tmp_path, **{"a-00001-of-00002": "x", "a-00002-of-00002": "y"})
    check_refused(CheckpointError, [(r"with none\. Pass the path of the file", load)], tmp_path)
    assert list(load(saved(tmp_path, b="z"))) == ["z"]
