"""The index of a checkpoint: its contents and where they are stored."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpipe._util.files import advice, parse_json
from jaxpipe._util.paths import read_any
from jaxpipe._util.stores import AnyPath
from jaxpipe.core.state import Leaf, Span
from jaxpipe.errors import CheckpointError, shown
from jaxpipe.layers import LORA_PARAMETERS

from ._json import check_json, decode_state
from ._struct import checked_struct, load_struct

INDEX = "index.json"


@dataclass(frozen=True)
class StoredArray:
    """One global array on disk, of shape `[num_rows, ...]`.

    Attributes:
        grid: Number of blocks along each dim. The first dim is cut into rows; the others are cut
            if devices hold parts of a row.
        sha256: Hash of each block's bytes, in hexadecimal, with blocks along the last dim next to
            each other.
    """

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]
    sha256: tuple[str, ...]

    def blocks(self, row: int) -> list[tuple[int, tuple[slice, ...]]]:
        """Return the blocks of a row, each as its number and its slices of the row."""
        sizes = [size // count for size, count in zip(self.shape[1:], self.grid[1:], strict=True)]
        first = row * math.prod(self.grid[1:])
        return [
            (
                number,
                tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, sizes, strict=True)),
            )
            for number, at in enumerate(np.ndindex(*self.grid[1:]), first)
        ]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredLayer:
    """One layer of the model.

    Attributes:
        name: Begins with the layer's index in the model.
        kind: Name of its class or function.
        signature: Shapes and dtypes of its input and output for one microbatch.
        parameters: Keys of its parameters, including tied parameters.
    """

    name: str
    kind: str
    stage: int
    signature: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """Contents of a checkpoint.

    Attributes:
        mesh: Sizes of the mesh's axes.
        leaves: Where each leaf is stored, by key.
        scalars: `step`, `skipped_steps`, `rng` and `loss_scale` of the state.
        batch: Structure of a microbatch, if it consists of dictionaries, lists and tuples.
        data_iterators: State of each process's data iterator; None if it has no state.
        client_state: The caller's own state.
        versions: Versions of the libraries.
        excluded: Keys of frozen parameters that were left out.
        adapters: Keys of parameters of adapters.
    """

    global_steps: int
    global_samples: int
    mesh: Mapping[str, int]
    zero_stage: int
    layers: tuple[StoredLayer, ...]
    leaves: Mapping[str, Leaf]
    arrays: Mapping[str, StoredArray]
    scalars: Mapping[str, Any]
    batch: Any
    data_iterators: list[Any]
    client_state: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    excluded: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


def kernel_key(adapter: str) -> str:
    """The key of the kernel that a parameter of an adapter is beside."""
    return adapter.rpartition("/")[0] + "/kernel"


def dump_index(index: Index) -> bytes:
    """Convert an index to JSON."""
    content = {
        **{name: getattr(index, name) for name in _PLAIN},
        "layers": [asdict(layer) for layer in index.layers],
        "leaves": {key: _dump_leaf(leaf) for key, leaf in index.leaves.items()},
        "arrays": {name: asdict(array) for name, array in index.arrays.items()},
        "excluded": list(index.excluded),
        "adapters": list(index.adapters),
    }
    return json.dumps(content, indent=1).encode()


_PLAIN = (
    *(
        "global_steps",
        "global_samples",
        "mesh",
        "zero_stage",
        "scalars",
        "batch",
        "data_iterators",
        "client_state",
    ),
    *("config", "versions"),
)


def read_index(path: AnyPath, sha256: str) -> Index:
    """Read an index and check its bytes against this hash, in hexadecimal."""
    try:
        content = read_any(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable, but got {error.strerror or error}. "
            f"{advice(error, 'Load another tag, or restore the file')}."
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"{path} must be as it was written, with sha256={sha256[:12]}..., but got "
            f"{found[:12]}... over {len(content)} bytes: it is damaged. Load another tag, or "
            "restore the file."
        )
    try:
        return _load_index(parse_json(content))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"{path} must be an index as save_checkpoint writes it, but got one that fails with "
            f"{type(error).__name__}: {str(error)[:300]}. Load another tag."
        ) from error


def _load_index(given: Mapping[str, Any]) -> Index:
    arrays = {name: _load_array(name, each) for name, each in given["arrays"].items()}
    leaves = {key: _load_leaf(key, leaf, arrays) for key, leaf in given["leaves"].items()}
    paths = {tuple(key.split("/")) for key in leaves}
    for path in paths:
        _check(
            len(path) > 1 and not any(path[:i] in paths for i in range(1, len(path))),
            "leaves",
            "/".join(path),
        )
    if given["batch"] is not None:
        load_struct(given["batch"])
    for name, is_sound in _SOUND.items():
        _check(is_sound(given[name]), name, given[name])
    excluded = given.get("excluded", [])  # missing in checkpoints from before 0.1
    is_sound = isinstance(excluded, list) and all(
        isinstance(key, str) and key not in leaves for key in excluded
    )
    _check(is_sound, "excluded", excluded)
    named = [
        key
        for key in leaves
        if key.startswith("params/")
        and re.search(LORA_PARAMETERS, key)
        and kernel_key(key) in {*leaves, *excluded}
    ]
    adapters = given.get("adapters", named)  # missing in checkpoints from before 0.1
    _check(isinstance(adapters, list) and set(adapters) <= {*named}, "adapters", adapters)
    return Index(
        **{name: given[name] for name in _PLAIN},
        layers=tuple(_load_layer(each, leaves) for each in given["layers"]),
        leaves=leaves,
        arrays=arrays,
        excluded=tuple(excluded),
        adapters=tuple(adapters),
    )


def _check(is_sound: bool, name: str, value: Any) -> None:
    if not is_sound:
        raise ValueError(f"{name} is {shown(value)}")


def _is_count(value: Any, most: int = 1 << 62) -> bool:
    return type(value) is int and 0 <= value < most


def _are_scalars(given: Mapping[str, Any]) -> bool:
    words = given["rng"]["words"]
    scale = given["loss_scale"]
    return (
        all(_is_count(given[name], 1 << 31) for name in ("step", "skipped_steps"))
        and isinstance(given["rng"]["impl"], str)
        and isinstance(words, list)
        and all(_is_count(word, 1 << 32) for word in words)
        and isinstance(scale, dict)
        and all(
            type(value) in (bool, int, float) and abs(value) < 1 << 62 for value in scale.values()
        )
    )


def _are_iterators(given: Any) -> bool:
    for each in given:
        check_json(each, "data_iterators")
        decode_state(each)
    return isinstance(given, list) and len(given) > 0


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "global_steps": _is_count,
    "global_samples": _is_count,
    "mesh": lambda given: all(_is_count(length) for length in given.values()),
    "zero_stage": _is_count,
    "scalars": _are_scalars,
    "data_iterators": _are_iterators,
    "client_state": lambda given: isinstance(given, dict),
    "config": lambda given: isinstance(given, dict),
    "versions": lambda given: all(isinstance(version, str) for version in given.values()),
}
"""Checks of the plain entries of an index; a check may also raise."""


def _load_array(name: str, given: Mapping[str, Any]) -> StoredArray:
    shape, _ = checked_struct(given["shape"], given["dtype"])
    sha256 = given["sha256"]
    _check(
        isinstance(sha256, list) and all(isinstance(each, str) for each in sha256),
        f"sha256 of {name}",
        sha256,
    )
    grid = _load_grid(f"grid of {name}", given["grid"], shape)
    if len(shape) == 0 or grid[0] != shape[0] or len(sha256) != math.prod(grid):
        raise ValueError("not every block has a sha256")
    return StoredArray(shape, given["dtype"], grid, tuple(sha256))


def _load_grid(name: str, given: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    is_list = isinstance(given, list) and len(given) == len(shape) and all(map(_is_count, given))
    _check(
        is_list
        and all(count and size % count == 0 for count, size in zip(given, shape, strict=True)),
        name,
        given,
    )
    return tuple(given)


def _load_layer(given: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> StoredLayer:
    fields: dict[str, Any] = {**given, "parameters": tuple(given["parameters"])}
    layer = StoredLayer(**fields)
    _check(
        all(isinstance(text, str) for text in (layer.name, layer.kind, layer.signature)),
        "a layer",
        given,
    )
    _check(
        _is_count(layer.stage) and all(key in leaves for key in layer.parameters), "a layer", given
    )
    return layer


def _dump_leaf(leaf: Leaf) -> dict[str, Any]:
    spans = [{**asdict(span), "rows": list(span.rows)} for span in leaf.copies[0]]
    return {"shape": list(leaf.shape), "dtype": leaf.dtype, "grid": list(leaf.grid), "spans": spans}


def _load_leaf(key: str, given: Mapping[str, Any], arrays: Mapping[str, StoredArray]) -> Leaf:
    spans = tuple(
        Span(x["array"], tuple(map(index, x["rows"])), index(x["start"]), index(x["stop"]))
        for x in given["spans"]
    )
    shape, _ = checked_struct(given["shape"], given["dtype"])
    grid = _load_grid(f"grid of {key}", given["grid"], shape)
    _check(len(spans) == math.prod(grid), f"spans of {key}", given)
    leaf = Leaf(shape, given["dtype"], grid, (spans,))
    for span in spans:
        num_rows, *row = arrays[span.array].shape
        is_inside = 0 <= span.start <= span.stop <= math.prod(row) and set(span.rows) <= set(
            range(num_rows)
        )
        num_elements = len(span.rows) * (span.stop - span.start)
        is_enough = len(span.rows) > 0 and num_elements >= math.prod(leaf.slice_shape())
        if not is_inside or not is_enough or arrays[span.array].dtype != leaf.dtype:
            raise ValueError(f"{key} does not lie inside {span.array}")
    return leaf
