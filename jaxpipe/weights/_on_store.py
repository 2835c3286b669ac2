"""Safetensors files that are read as byte ranges: on a store, or with dtypes unknown to NumPy."""

import json
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jaxpipe._util.paths import read_any, size_of
from jaxpipe._util.stores import AnyPath, StorePath, staging_folder

DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
"""Safetensors' names for NumPy's dtypes."""
_NAMES = {theirs: ours for ours, theirs in DTYPES.items()} | {"F8_E4M3": "float8_e4m3fn"}
"""JAX's dtypes by the names of those that are read."""
_LONGEST_HEADER = 100_000_000
"""Bytes, as in the safetensors library."""


class StoreTensors:
    """A safetensors file or object, with the methods and errors of the library's `safe_open`."""

    def __init__(self, path: AnyPath) -> None:
        size = size_of(path)
        # Of less than 8 bytes, the filling makes a length that no file has.
        (length,) = struct.unpack("<Q", read_any(path, 0, 8).ljust(8, b"\xff"))
        begin = 8 + length
        if begin > size or length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        content = read_any(path, 8, begin)
        if isinstance(path, StorePath):
            _check_header(content, size)
        header = json.loads(content)
        header.pop("__metadata__", None)
        self._tensors = {
            name: _Tensor(
                path,
                entry["dtype"],
                entry["shape"],
                *(begin + offset for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> np.ndarray:
        """A tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> "_Tensor":
        """Return a tensor that is fetched when it is first indexed."""
        # A copy, with which the bytes that it fetches are freed.
        return replace(self._tensors[name])


@dataclass
class _Tensor:
    path: AnyPath
    dtype: str
    shape: list[int]
    start: int
    stop: int

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, at: Any, /) -> np.ndarray:
        return self._fetched[at]

    @cached_property
    def _fetched(self) -> np.ndarray:
        if self.dtype not in _NAMES:
            raise ValueError(f"the dtype {self.dtype} is not supported by numpy")
        content = read_any(self.path, self.start, self.stop)
        return np.frombuffer(content, jnp.dtype(_NAMES[self.dtype])).reshape(self.shape)


def _check_header(content: bytes, size: int) -> None:
    """Let the library check a header, on a file of that size with holes instead of the tensors."""
    with staging_folder() as folder:
        file = folder / "header.safetensors"
        with file.open("wb") as handle:
            handle.write(struct.pack("<Q", len(content)) + content)
            handle.truncate(size)
        with safe_open(str(file), framework="numpy"):
            pass
