"""Parameters out of the files of Hugging Face's libraries, by a table of names."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.distributed import run_on_all
from jaxpipe.layers import LORA_PARAMETERS
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import TrainState

from ._load import read_into
from ._rename import Index, Match, Rename, Shape, check_theirs, first_of, match_renames
from ._safetensors import open_safetensors, safetensors_files

_PARAMS = "params/"


def load_huggingface(
    folder: str | PathLike[str],
    renames: Sequence[Rename],
    pipeline: Pipeline,
    state: TrainState,
    when_read: Callable[[], None] = lambda: None,
) -> TrainState:
    """Read the parameters of a state out of safetensors files; all processes call.

    A process reads the tensors of its own stages alone, one after another.

    Args:
        folder: Holds one safetensors file, or the index of several; or the path of that file.
        renames: The table of names, such as `jaxpipe.models.llama_names(config)`. Adapters of `jaxpipe.layers.lora`
            are not in it, and keep their values.
        pipeline: What the state belongs to.
        state: The present one. Once everything has been read its parameters are deleted; everything else stays.
        when_read: Called when everything has been read and nothing changed yet.

    Returns:
        The new state; parameters have the dtypes they had.

    Raises:
        CheckpointError: A file is missing or damaged; the table does not name every leaf once; or tensors are missing,
            left over or of another shape; the state is as it was.
    """
    keys = [key for key in pipeline.catalog if key.startswith(_PARAMS) and not re.search(LORA_PARAMETERS, key)]
    shapes = {key.removeprefix(_PARAMS): tuple(pipeline.catalog[key].shape) for key in keys}
    files = run_on_all(lambda: _Files(Path(folder), renames, shapes))
    assert files is not None  # it ran on all processes
    return read_into(pipeline, state, keys, files.leaves, when_read)


class _Files:
    """Safetensors files that hold what a table asks for."""

    def __init__(self, folder: Path, renames: Sequence[Rename], shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._file_of: dict[str, Path] = {}
        theirs: dict[str, Shape] = {}
        for file, names in safetensors_files(folder).items():
            with open_safetensors(file) as tensors:
                for name in names:
                    self._file_of[name], theirs[name] = file, tuple(tensors.get_slice(name).get_shape())
        matches = match_renames(renames, shapes)
        check_theirs(str(folder), renames, matches, theirs)
        self._match_of: dict[str, Match] = {key: match for match in matches for key in match.ours}

    def leaves(self, keys: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Leaves by their keys in the catalog."""
        with contextlib.ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for key in keys:
                path = key.removeprefix(_PARAMS)
                match = self._match_of[path]
                for name in (name for names in match.theirs for name in names):
                    file = self._file_of.get(name)
                    if file is not None and file not in opened:
                        opened[file] = stack.enter_context(open_safetensors(file))
                tensors = {
                    name: _Slices(opened[self._file_of[name]].get_slice(name))
                    for names in match.theirs
                    for name in names
                    if name in self._file_of
                }
                theirs = [first_of(names, tensors) for names in match.theirs]
                yield key, match.read(theirs, path, tuple(slice(0, size) for size in self._shapes[path]))


class _Slices:
    """A tensor in a file, read where it is indexed."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape: Shape = tuple(tensor.get_shape())

    def __getitem__(self, at: Index, /) -> np.ndarray:
        return np.asarray(self._tensor[at] if at else self._tensor[...])
