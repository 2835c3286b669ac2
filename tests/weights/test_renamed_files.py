"""Leaves read from safetensors files by a table: what each dtype and shape may be."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpipe.errors import CheckpointError
from jaxpipe.weights import Rename, RenamedFiles, split, stack
from jaxpipe.weights._mxfp4 import find_mxfp4

TABLE = [Rename("w", "0/w"), Rename("n", "0/n"), Rename("qk", ("1/q", "1/k"), split())]
LEAVES = {
    "layers/0_A/w": jax.ShapeDtypeStruct((), jnp.float32),
    "layers/0_A/n": jax.ShapeDtypeStruct((2,), jnp.int32),
    "layers/1_B/q": jax.ShapeDtypeStruct((1, 2), jnp.float32),
    "layers/1_B/k": jax.ShapeDtypeStruct((2, 2), jnp.float32),
}


def found(folder: Path, **dtypes: Any) -> dict[str, np.ndarray]:
    """The leaves of a file whose tensors have these dtypes, float32 if none is given."""
    values = {"w": np.array(7), "n": np.array([1, 2]), "qk": np.arange(6).reshape(3, 2)}
    tensors = {name: x.astype(dtypes.get(name, np.float32)) for name, x in values.items()}
    save_file(tensors, folder / "model.safetensors")
    return dict(RenamedFiles(folder, TABLE, LEAVES).leaves(list(LEAVES)))


def test_scalars_and_parts_of_tensors_are_read(tmp_path: Path) -> None:
    leaves = found(tmp_path, n=np.int32, w=np.float64, qk=jnp.bfloat16)
    assert {key.split("/")[-1]: x.tolist() for key, x in leaves.items()} == {
        "w": 7,
        "n": [1, 2],
        "q": [[0, 1]],
        "k": [[2, 3], [4, 5]],
    }


def test_integers_are_no_weights(tmp_path: Path) -> None:
    """Where all leaves of a tensor hold floating-point numbers."""
    words = "but got w of I64, qk of I8. Write them in a floating-point dtype"
    with pytest.raises(CheckpointError, match=words):
        found(tmp_path, n=np.int32, w=np.int64, qk=np.int8)
    mixed = {**LEAVES, "layers/1_B/k": jax.ShapeDtypeStruct((2, 2), jnp.int32)}
    save_file(
        {
            "w": np.array(7, np.float32),
            "n": np.zeros(2, np.int32),
            "qk": np.zeros((3, 2), np.int8),
        },
        tmp_path / "model.safetensors",
    )
    RenamedFiles(tmp_path, TABLE, mixed)


def test_of_many_integers_four_are_named(tmp_path: Path) -> None:
    def refused(count: int) -> str:
        save_file({f"w{i}": np.zeros(2, np.int8) for i in range(count)}, tmp_path / "m.safetensors")
        leaf = jax.ShapeDtypeStruct((count, 2), jnp.float32)
        with pytest.raises(CheckpointError) as error:
            RenamedFiles(tmp_path, [Rename("w{e}", "0/w", stack())], {"layers/0_A/w": leaf})
        return str(error.value)

    assert "w2 of I8, w3 of I8. Write" in refused(4)
    assert "w2 of I8, w3 of I8 and 1 more. Write" in refused(5)


def test_what_is_a_packed_weight() -> None:
    """Four bits for each number: two tensors of bytes, and no tensor of the weight's own name."""
    blocks, scales = (2, 6, 3, 16), (2, 6, 3)

    def packed(shapes: dict[str, tuple[int, ...]], **dtypes: str) -> Any:
        return find_mxfp4(shapes, {name: dtypes.get(name, "U8") for name in shapes})

    whole = {"w_blocks": blocks, "w_scales": scales}
    assert packed(whole) == {"w": (2, 96, 6)}
    assert packed(whole | {"v": (1,)}) == {"w": (2, 96, 6)}
    for shapes in (
        {"w_blocks": blocks},
        whole | {"w": (2, 96, 6)},
        whole | {"w_scales": (2, 6, 4)},
        {"w_blocks": blocks[1:], "w_scales": scales[1:]},
        {"w_blocks": (2, 6, 3, 8), "w_scales": scales},
        {"w": blocks, "w_scales": scales},
    ):
        assert packed(shapes) == {}, shapes
    assert packed(whole, w_scales="F32") == packed(whole, w_blocks="I8") == {}
