"""Weights of eight bits with a factor for each block, read from files of DeepSeek's kind."""

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _disk_store import DiskStore

from jaxpipe._util.paths import any_path
from jaxpipe.errors import CheckpointError
from jaxpipe.weights import Rename, RenamedFiles, stack, transpose
from jaxpipe.weights._block_scaled import BlockScaled

ROWS, COLUMNS = 130, 300
TABLE = [
    Rename("h.weight", "0/kernel", transpose),
    Rename("h.{e}.weight", "1/experts", stack(transpose)),
]
DTYPES = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, content = {}, b""
    for name, x in tensors.items():
        begin, content = len(content), content + x.tobytes()
        offsets = [begin, len(content)]
        dtype = DTYPES[x.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def make() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What is in the files, and the matrices that it means."""
    rng = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    matrices: dict[str, np.ndarray] = {}
    for name in ("h.weight", "h.0.weight", "h.1.weight"):
        values = rng.normal(size=(ROWS, COLUMNS)).astype(jnp.float8_e4m3fn)
        scales = rng.uniform(0.5, 2, size=(2, 3)).astype(np.float32)
        tensors |= {name: values, f"{name}_scale_inv": scales}
        matrices[name] = values.astype(np.float32)
        for row in range(ROWS):
            for column in range(COLUMNS):
                matrices[name][row, column] *= scales[row // 128, column // 128]
    return tensors, matrices


LEAVES = {
    "layers/0_Dense/kernel": jax.ShapeDtypeStruct((COLUMNS, ROWS), jnp.float32),
    "layers/1_Experts/experts": jax.ShapeDtypeStruct((2, COLUMNS, ROWS), jnp.float32),
}


@pytest.mark.parametrize("is_stored", [False, True])
def test_leaves_are_the_products_of_values_and_scales(tmp_path: Path, *, is_stored: bool) -> None:
    tensors, matrices = make()
    write(tmp_path / "model.safetensors", tensors)
    folder = f"{DiskStore.protocol}://{tmp_path}" if is_stored else str(tmp_path)
    found = dict(RenamedFiles(any_path(folder, "folder"), TABLE, LEAVES).leaves(list(LEAVES)))
    np.testing.assert_array_equal(found["layers/0_Dense/kernel"], matrices["h.weight"].T)
    wanted = np.stack([matrices["h.0.weight"].T, matrices["h.1.weight"].T])
    np.testing.assert_array_equal(found["layers/1_Experts/experts"], wanted)


def test_matrices_without_their_scales_are_refused(tmp_path: Path) -> None:
    tensors, _ = make()
    for scales, text in ((None, "none"), (np.ones((3, 2), np.float32), r"\[3, 2\]")):
        mistaken = {**tensors, "h.weight_scale_inv": scales}
        write(tmp_path / "model.safetensors", {k: x for k, x in mistaken.items() if x is not None})
        match = rf"F8_E4M3, h.weight_scale_inv \[2, 3\] for h.weight, but got {text}. Write the"
        with pytest.raises(CheckpointError, match=match):
            RenamedFiles(tmp_path, TABLE, LEAVES)


def test_a_slice_may_begin_and_end_inside_of_blocks() -> None:
    tensors, matrices = make()
    matrix = BlockScaled(tensors["h.weight"], tensors["h.weight_scale_inv"])
    assert matrix.shape == (ROWS, COLUMNS)
    for rows in ((0, ROWS), (100, 129), (127, 128), (128, ROWS)):
        for columns in ((0, COLUMNS), (5, 6), (120, 260), (128, 256), (256, COLUMNS)):
            at = slice(*rows), slice(*columns)
            np.testing.assert_array_equal(matrix[at], matrices["h.weight"][at], str(at))


def test_a_vector_of_eight_bits_is_refused(tmp_path: Path) -> None:
    tensors, _ = make()
    vector = tensors["h.weight"][0]
    tensors |= {"v": vector, "v_scale_inv": np.ones(3, np.float32)}
    write(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"v_scale_inv \[3\] for v, but got \[3\]. Write"):
        RenamedFiles(tmp_path, TABLE, LEAVES)
