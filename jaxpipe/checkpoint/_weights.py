"""Parameters of checkpoints as safetensors files, with our paths or Hugging Face's names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.paths import any_path
from jaxpipe._util.stores import AnyPath, StorePath
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import Leaf, TrainState
from jaxpipe.distributed import run_on_all
from jaxpipe.errors import CheckpointError, shown
from jaxpipe.layers import merge_lora
from jaxpipe.weights import (
    CONFIG,
    Match,
    Rename,
    RenamedFiles,
    Source,
    check_shard_size,
    check_target,
    dump_config,
    match_renames,
    read_config_json,
    write_safetensors,
)

from ._describe import adapter_keys
from ._index import kernel_key
from ._load import read_into, read_leaves, with_params
from ._open import Checkpoint, open_checkpoint, reread

_PARAMS = "params/"
_COLLECTIONS = "collections/"
_SHARD_BYTES = 5_000_000_000


def load_huggingface(
    folder: str | PathLike[str] | StorePath,
    renames: Sequence[Rename],
    pipeline: Pipeline,
    state: TrainState,
    when_read: Callable[[], None] = lambda: None,
) -> TrainState:
    """Read the parameters of a state from safetensors files; all processes must call this.

    Each process reads only the tensors of its own stages, one at a time.

    Args:
        folder: A folder with one safetensors file or with the index of several, or the path of
            such a file.
        renames: The table of names, such as `jaxpipe.models.llama_names(config)`. Adapters of
            `jaxpipe.layers.lora` do not belong in the table; they keep their values.
        pipeline: The pipeline that the state is for.
        state: The current state. Its parameters are deleted once everything has been read; the rest
            of the state is unchanged.
        when_read: Called when everything has been read and before anything changes.

    Returns:
        The new state. Parameters keep their dtypes.

    Raises:
        CheckpointError: A file is missing or damaged; the table does not name every leaf exactly
            once; or tensors are missing, are left over, have another shape, or hold integers for
            floating-point leaves. The state is unchanged.
    """
    adapters = adapter_keys(pipeline)
    keys = [
        key for key in pipeline.states.catalog if key.startswith(_PARAMS) and key not in adapters
    ]
    leaves = {key.removeprefix(_PARAMS): _struct_of(pipeline.states.catalog[key]) for key in keys}
    files = run_on_all(lambda: RenamedFiles(any_path(folder, "folder"), renames, leaves))
    assert files is not None  # set on every process

    def source(keys: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        paths = [key.removeprefix(_PARAMS) for key in keys]
        return ((_PARAMS + path, value) for path, value in files.leaves(paths))

    return pipeline.states.restart_average(read_into(pipeline, state, keys, source, when_read))


def save_huggingface(  # noqa: PLR0913  # one file or choice each
    path: str | PathLike[str] | StorePath,
    folder: str | PathLike[str] | StorePath,
    renames: Sequence[Rename],
    *,
    config: Source | None = None,
    tag: str | None = None,
    params: str | None = None,
    dtype: Any = None,
    lora_alpha: float | None = None,
    max_shard_bytes: int | None = _SHARD_BYTES,
) -> list[AnyPath]:
    """Write the parameters of a checkpoint as a folder that Hugging Face's libraries can open.

    Call this from one process. Files get their final names only once they are complete. At most a
    few of the checkpoint's arrays are in memory at a time, and the leaves that are combined into
    one tensor. Tokenizer files are not written; copy them yourself.

    Args:
        path: The directory that was passed to `save_checkpoint`, or a checkpoint's own folder.
        folder: The folder to write. Files of an earlier call are replaced.
        renames: The table of names, such as `jaxpipe.models.llama_names(config)`.
        config: The model's `config.json`: the file, its folder, or its contents, such as the result
            of `LlamaConfig.to_huggingface`. It is written with the dtype of the tensors, without
            formats of quantised weights, and says whether the head is tied. With None, no file is
            written, for a folder that already has one.
        tag: Name of the checkpoint. None selects the latest.
        params: As for `load_params`: `"ema"` writes the moving average.
        dtype: The dtype to convert floating-point tensors to, such as `"bfloat16"`. None keeps
            their dtypes.
        lora_alpha: The alpha that was passed to `jaxpipe.layers.lora`. Adapters are merged into
            their kernels.
        max_shard_bytes: As for `export_safetensors`. The default is 5 GB, as in `transformers`.

    Returns:
        The paths of the written files.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, lacks frozen parameters, has
            collections (which no table can name), or has adapters although `lora_alpha` is not
            given. Also raised if the table does not name every leaf exactly once, `dtype` is not a
            floating-point dtype, the folder cannot be written, or another process is writing there.
        ConfigError: `config` cannot be read, or describes parts, blocks, sizes of the embedding,
            biases or a head that the checkpoint does not have.
    """
    check_shard_size(max_shard_bytes)
    contents = None if config is None else read_config_json(config)
    to = _floating(dtype)
    target = any_path(folder, "folder") / "model.safetensors"

    def write() -> list[AnyPath]:
        checkpoint = with_params(open_checkpoint(path, tag), params)
        tensors = _Tensors(checkpoint, renames, to, lora_alpha)
        described = {} if contents is None else {CONFIG: tensors.describe(contents, renames)}
        metadata = {"format": "pt"}  # `transformers` does not open files without it
        return write_safetensors(
            tensors.path,
            target,
            tensors.structs,
            tensors.values(),
            metadata,
            max_shard_bytes,
            described,
        )

    return reread(path, write)


def _floating(dtype: Any) -> jnp.dtype | None:
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = jnp.dtype(bool)
    if found is not None and not jnp.issubdtype(found, jnp.floating):
        raise CheckpointError(
            f"dtype must be a floating-point dtype, but got dtype={shown(dtype)}. Write for "
            "instance 'bfloat16', or leave it out."
        )
    return found


def _struct_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))


class _Tensors:
    """The leaves of a checkpoint as tensors with Hugging Face's names."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        renames: Sequence[Rename],
        # Of floating-point tensors; None converts none.
        dtype: jnp.dtype | None,
        # As for `save_huggingface`.
        lora_alpha: float | None,
    ) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._alpha = lora_alpha
        leaves = {
            key: leaf for key, leaf in checkpoint.index.leaves.items() if key.startswith(_PARAMS)
        }
        adapters = checkpoint.index.adapters
        _check_whole(checkpoint, adapters, lora_alpha)
        named = {
            key.removeprefix(_PARAMS): leaf for key, leaf in leaves.items() if key not in adapters
        }
        matches = match_renames(renames, {path: leaf.shape for path, leaf in named.items()})
        self._beside: dict[str, list[str]] = {}
        """The keys of adapters, by their kernel's."""
        for key in adapters:
            self._beside.setdefault(kernel_key(key), []).append(key)
        # For each match, the keys that it needs: its leaves and their adapters, if any.
        self._needs: list[tuple[Match, list[str]]] = []
        self.structs: dict[str, jax.ShapeDtypeStruct] = {}
        for match in matches:
            keys = [_PARAMS + path for path in match.ours]
            beside = [each for key in keys for each in self._beside.get(key, ())]
            self._needs.append((match, keys + beside))
            own = np.result_type(*(_struct_of(named[path]).dtype for path in match.ours))
            to = dtype if dtype is not None and jnp.issubdtype(own, jnp.floating) else own
            shape = match.transform.their_shape(match.shapes)
            self.structs |= {names[0]: jax.ShapeDtypeStruct(shape, to) for names in match.theirs}

    def describe(self, config: Mapping[str, Any], renames: Sequence[Rename]) -> bytes:
        """The contents of `config.json`; see `dump_config`."""
        return dump_config(config, self.structs, renames, [match for match, _ in self._needs])

    def values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield all tensors with their names, in the order in which their leaves are read."""
        match_of = {key: (match, keys) for match, keys in self._needs for key in keys}
        waiting: dict[str, np.ndarray] = {}
        for read, value in read_leaves(self._checkpoint, list(match_of)):
            waiting[read] = value
            match, keys = match_of[read]
            if not all(key in waiting for key in keys):
                continue
            leaves = {key: waiting.pop(key) for key in keys}
            for key in self._beside.keys() & leaves:
                assert self._alpha is not None  # checked earlier if there are adapters
                module = {x.rpartition("/")[2]: leaves[x] for x in (key, *self._beside[key])}
                # Merge in float32: rounding to the kernel's dtype first would lose small changes.
                leaves[key] = merge_lora(module, self._alpha, np.float32)["kernel"]
            ours = [leaves[_PARAMS + path] for path in match.ours]
            for number, names in enumerate(match.theirs):
                yield (
                    names[0],
                    match.transform.write(number, ours).astype(self.structs[names[0]].dtype),
                )


def _check_whole(checkpoint: Checkpoint, adapters: Sequence[str], lora_alpha: float | None) -> None:
    """Refuse a checkpoint whose export would not be a complete model."""
    index = checkpoint.index
    if index.excluded:
        raise CheckpointError(
            f"{checkpoint.path} must hold all parameters, but got a checkpoint without "
            f"{len(index.excluded)} frozen ones. Load it into an engine that has them, and save "
            "that with exclude_frozen_parameters=False."
        )
    collections = [
        key.removeprefix(_COLLECTIONS) for key in index.leaves if key.startswith(_COLLECTIONS)
    ]
    if collections:
        raise CheckpointError(
            f"{checkpoint.path} must hold only parameters, because renames covers nothing more, "
            f"but got collections such as {collections[0]!r}. Write them with export_safetensors."
        )
    if bool(adapters) != (lora_alpha is not None):
        repair = (
            "Pass the alpha that lora was given, to merge them"
            if adapters
            else "Leave lora_alpha out"
        )
        raise CheckpointError(
            "lora_alpha must be given where a checkpoint has adapters, and only there, but got "
            f"lora_alpha={lora_alpha} and {len(adapters)} leaves of adapters in {checkpoint.path}. "
            f"{repair}."
        )


def export_safetensors(
    path: str | PathLike[str] | StorePath,
    out: str | PathLike[str] | StorePath,
    tag: str | None = None,
    *,
    params: str | None = None,
    max_shard_bytes: int | None = None,
) -> list[AnyPath]:
    """Write the parameters and collections of a checkpoint as safetensors files.

    Call this from one process. Tensors are named by their path in the model's tree:
    `layers/<index>_<name>/...`, `tied/<key>/...`, and `collections/<index>_<name>/...`. A slash
    inside a parameter's own name is written as `%2F`. The files do not depend on the number of
    stages and replicas. Files get their final names only once they are complete, and at most a few
    of the checkpoint's arrays are in memory at a time.

    Args:
        path: The directory that was passed to `save_checkpoint`, or a checkpoint's own folder.
        out: The file to write, such as `model.safetensors`. An earlier export with this name is
            replaced.
        tag: Name of the checkpoint. None selects the latest.
        params: As for `load_params`.
        max_shard_bytes: Largest total size of the tensors in a file, unless a single tensor is
            larger. If one file is not enough, files are named `model-00001-of-00002.safetensors`
            and so on, and `model.safetensors.index.json` lists which tensor is in which file, as
            Hugging Face libraries do. None writes one file.

    Returns:
        The paths of the written files; an index comes last.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it has a dtype that safetensors
            does not support. Also raised if `out` does not end in `.safetensors`, cannot be written
            or is next to an export in other files, or `max_shard_bytes` is not positive.
    """
    target = check_target(any_path(out, "out"))
    check_shard_size(max_shard_bytes)

    def write() -> list[AnyPath]:
        checkpoint = with_params(open_checkpoint(path, tag), params)
        return _export(checkpoint, target, max_shard_bytes)

    return reread(path, write)


def _export(checkpoint: Checkpoint, target: AnyPath, max_shard_bytes: int | None) -> list[AnyPath]:
    index = checkpoint.index
    ordered = [key for layer in index.layers for key in layer.parameters]
    rest = sorted(key for key in index.leaves if key.startswith((_PARAMS, _COLLECTIONS)))
    keys = list(dict.fromkeys(ordered + rest))
    tensors = {key.removeprefix(_PARAMS): _struct_of(index.leaves[key]) for key in keys}
    values = ((key.removeprefix(_PARAMS), value) for key, value in read_leaves(checkpoint, keys))
    metadata = {"format": "jaxpipe", "global_steps": str(index.global_steps)}
    return write_safetensors(checkpoint.path, target, tensors, values, metadata, max_shard_bytes)
