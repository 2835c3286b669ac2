"""Leaves of a model, read from safetensors files by a table of names."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.stores import AnyPath
from jaxpipe.errors import CheckpointError

from ._block_scaled import BlockScaled, scales_of
from ._mxfp4 import Mxfp4Tensor, find_mxfp4, stored_names
from ._rename import Match, Rename, check_theirs, first_of, match_renames
from ._safetensors import open_safetensors, safetensors_files
from ._transform import Index, Shape, Tensor


class RenamedFiles:
    """Safetensors files that contain the tensors of a table, for leaves by path.

    `folder` has one file or the index of several, or is the path of such a file.
    """

    def __init__(
        self, folder: AnyPath, renames: Sequence[Rename], leaves: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        self._shapes = {path: leaf.shape for path, leaf in leaves.items()}
        self._file_of: dict[str, AnyPath] = {}
        theirs: dict[str, Shape] = {}
        dtypes: dict[str, str] = {}
        for file, names in safetensors_files(folder).items():
            with open_safetensors(file) as tensors:
                for name in names:
                    tensor = tensors.get_slice(name)
                    self._file_of[name], theirs[name] = file, tuple(tensor.get_shape())
                    dtypes[name] = tensor.get_dtype()
        self._scales = scales_of(folder, dtypes, theirs)
        # Tables do not name scales, which are read with their matrices.
        for name in self._scales.values():
            del theirs[name]
        # Packed weights appear as the floating-point tensors they are read as.
        self._packed = find_mxfp4(theirs, dtypes)
        for name, shape in self._packed.items():
            for stored in stored_names(name):
                del theirs[stored]
            theirs[name], dtypes[name] = shape, "BF16"
        matches = match_renames(renames, self._shapes)
        check_theirs(str(folder), renames, matches, theirs)
        _check_dtypes(folder, matches, leaves, dtypes)
        self._match_of: dict[str, Match] = {key: match for match in matches for key in match.ours}

    def leaves(self, paths: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the leaves at these paths."""
        with contextlib.ExitStack() as stack:
            # Each file is opened once: many leaves come from one.
            opened: dict[AnyPath, Any] = {}
            for path in paths:
                match = self._match_of[path]

                def slices(name: str) -> "_Slices":
                    file = self._file_of[name]
                    if file not in opened:
                        opened[file] = stack.enter_context(open_safetensors(file))
                    return _Slices(opened[file].get_slice(name))

                tensors: dict[str, Tensor] = {}
                for name in (name for names in match.theirs for name in names):
                    if name in self._scales:
                        tensors[name] = BlockScaled(slices(name), slices(self._scales[name]))
                    elif name in self._packed:
                        tensors[name] = Mxfp4Tensor(*map(slices, stored_names(name)))
                    elif name in self._file_of:
                        tensors[name] = slices(name)
                theirs = [first_of(names, tensors) for names in match.theirs]
                yield (
                    path,
                    match.read(theirs, path, tuple(slice(0, size) for size in self._shapes[path])),
                )


def _check_dtypes(
    folder: AnyPath,
    matches: Sequence[Match],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    dtypes: Mapping[str, str],
) -> None:
    """Refuse integers for floating-point parameters, such as quantised weights without scales."""
    whole = [
        f"{name} of {dtypes[name]}"
        for match in matches
        if all(jnp.issubdtype(leaves[path].dtype, jnp.floating) for path in match.ours)
        for name in (name for names in match.theirs for name in names)
        if name in dtypes and not dtypes[name].startswith(("F", "BF"))
    ]
    if whole:
        more = f" and {len(whole) - 4} more" if len(whole) > 4 else ""
        raise CheckpointError(
            f"{folder} must hold floating-point tensors for floating-point parameters, but got "
            f"{', '.join(whole[:4])}{more}. Write them in a floating-point dtype, such as BF16, "
            "dequantised."
        )


class _Slices:
    """A tensor in a file, of which only the indexed slices are read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.shape: Shape = tuple(tensor.get_shape())

    def __getitem__(self, at: Index, /) -> np.ndarray:
        return np.asarray(self._tensor[at] if at else self._tensor[...])
