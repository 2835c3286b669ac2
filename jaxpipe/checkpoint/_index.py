"""The index of a checkpoint: what is in it, and where it lies."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpipe.errors import CheckpointError
from jaxpipe.runtime import Leaf, Span

INDEX = "index.json"


@dataclass(frozen=True)
class StoredArray:
    """One global array on disk.

    Attributes:
        shape: Its shape, `[num_rows, ...]`.
        dtype: Its dtype, by name.
        sha256: For each row the hash of its bytes, in hexadecimal.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredLayer:
    """One layer of the model.

    Attributes:
        name: Its name, which begins with its place in the model.
        kind: Its class or function.
        stage: The stage that held it.
        signature: Shapes and dtypes of one microbatch before and after it.
        parameters: Keys of its parameters, those it shares included.
    """

    name: str
    kind: str
    stage: int
    signature: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        global_steps: Batches trained.
        global_samples: Samples trained.
        mesh: Lengths of the mesh's axes.
        zero_stage: Stage of ZeRO.
        layers: The model.
        leaves: Where each leaf lies, by its key.
        arrays: The global arrays by name.
        scalars: `step`, `skipped_steps`, `rng` and `loss_scale` of the state.
        batch: Form of a microbatch, if it has a plain one.
        data_iterators: State of the data iterator of each process; None where it has none.
        client_state: What the caller gave.
        config: The configuration.
        versions: Versions of the libraries.
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


def dump_index(index: Index) -> bytes:
    """The index as JSON."""
    content = {
        **{name: getattr(index, name) for name in _PLAIN},
        "layers": [asdict(layer) for layer in index.layers],
        "leaves": {key: _dump_leaf(leaf) for key, leaf in index.leaves.items()},
        "arrays": {name: asdict(array) for name, array in index.arrays.items()},
    }
    return json.dumps(content, indent=1).encode()


_PLAIN = (
    *("global_steps", "global_samples", "mesh", "zero_stage", "scalars", "batch", "data_iterators", "client_state"),
    *("config", "versions"),
)


def read_index(path: Path, sha256: str) -> Index:
    """Read an index.

    Args:
        path: The file.
        sha256: Hash of its bytes, in hexadecimal.

    Returns:
        The index.

    Raises:
        CheckpointError: It cannot be read, or is not what was written.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} must be readable, but got {error.strerror or error}. Load another tag, or restore the file."
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"{path} must be as it was written, with sha256={sha256[:12]}..., but got {found[:12]}... over "
            f"{len(content)} bytes: it is damaged. Load another tag, or restore the file."
        )
    try:
        return _load_index(json.loads(content))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be an index as save_checkpoint writes it, but got one that fails with "
            f"{type(error).__name__}: {error}. Load another tag."
        ) from error


def _load_index(given: Mapping[str, Any]) -> Index:
    arrays = {
        name: StoredArray(tuple(x["shape"]), x["dtype"], tuple(x["sha256"])) for name, x in given["arrays"].items()
    }
    if any(len(array.sha256) != array.shape[0] for array in arrays.values()):
        raise ValueError("not every row has a sha256")
    if {"step", "skipped_steps", "rng", "loss_scale"} - set(given["scalars"]) or not given["data_iterators"]:
        raise ValueError("scalars or the places in the data are missing")
    return Index(
        **{name: given[name] for name in _PLAIN},
        layers=tuple(StoredLayer(**{**x, "parameters": tuple(x["parameters"])}) for x in given["layers"]),
        leaves={key: _load_leaf(key, leaf, arrays) for key, leaf in given["leaves"].items()},
        arrays=arrays,
    )


def _dump_leaf(leaf: Leaf) -> dict[str, Any]:
    spans = [{**asdict(span), "rows": list(span.rows)} for span in leaf.copies[0]]
    return {"shape": list(leaf.shape), "dtype": leaf.dtype, "dim": leaf.dim, "spans": spans}


def _load_leaf(key: str, given: Mapping[str, Any], arrays: Mapping[str, StoredArray]) -> Leaf:
    spans = tuple(
        Span(x["array"], tuple(map(index, x["rows"])), index(x["start"]), index(x["stop"])) for x in given["spans"]
    )
    leaf = Leaf(tuple(given["shape"]), given["dtype"], given["dim"], (spans,))
    for span in spans:
        shape, num_held = arrays[span.array].shape, len(span.rows) * (span.stop - span.start)
        is_inside = 0 <= span.start <= span.stop <= math.prod(shape[1:]) and set(span.rows) <= set(range(shape[0]))
        if not is_inside or num_held < math.prod(leaf.part_shape()) or arrays[span.array].dtype != leaf.dtype:
            raise ValueError(f"{key} does not lie inside {span.array}")
    return leaf
