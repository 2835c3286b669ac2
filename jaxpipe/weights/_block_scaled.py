"""Weights of eight bits, with one factor for each block, as in DeepSeek V3's files."""

from collections.abc import Mapping

import numpy as np

from jaxpipe._util.stores import AnyPath
from jaxpipe.errors import CheckpointError

from ._transform import Index, Shape, Tensor

_EIGHT_BITS = "F8_E4M3"
_SUFFIX = "_scale_inv"
_BLOCK = 128


class BlockScaled:
    """A matrix of eight bits, read slice by slice as `values * scales`, in float32.

    `scales` have a factor for each block of 128 rows and columns, `[rows / 128, columns / 128]`,
    rounded up.
    """

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self._values = values
        self._scales = scales
        self.shape = values.shape

    def __getitem__(self, at: Index, /) -> np.ndarray:
        # A slice may begin and end inside of blocks: the scales of all that it overlaps are read.
        blocks = tuple(slice(x.start // _BLOCK, -(-x.stop // _BLOCK)) for x in at)
        scales = np.asarray(self._scales[blocks], np.float32)
        places = (np.arange(x.start, x.stop) // _BLOCK - x.start // _BLOCK for x in at)
        return np.asarray(self._values[at]).astype(np.float32) * scales[np.ix_(*places)]


def scales_of(
    source: AnyPath, dtypes: Mapping[str, str], shapes: Mapping[str, Shape]
) -> dict[str, str]:
    """Names of the scales of the matrices of eight bits in files, by the name of the matrix."""
    narrow = [name for name, dtype in dtypes.items() if dtype == _EIGHT_BITS]
    for name in narrow:
        # The last block of a dim may be smaller than the others.
        wanted = tuple(-(-size // _BLOCK) for size in shapes[name])
        found = shapes.get(name + _SUFFIX)
        if found != wanted or len(wanted) != 2:
            raise CheckpointError(
                f"{source} must hold a factor for each block of {_BLOCK} rows and columns of a "
                f"matrix in {_EIGHT_BITS}, {name + _SUFFIX} {list(wanted)} for {name}, but got "
                f"{'none' if found is None else list(found)}. Write the weights in BF16, "
                "dequantised."
            )
    return {name: name + _SUFFIX for name in narrow}
