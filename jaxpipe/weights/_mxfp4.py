"""Experts' weights in the format MXFP4, read as floating-point numbers.

Files of gpt-oss hold a weight `name`, `[E, in, out]`, as two tensors of bytes: `name_blocks`,
`[E, out, in / 32, 16]`, with two 4-bit numbers per byte, the lower one first, and `name_scales`,
`[E, out, in / 32]`, with the exponent that 32 numbers share.

Reference:
    Open Compute Project, "OCP Microscaling Formats (MX) Specification" (2023), section 5.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from ._transform import Index, Shape, Tensor

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BLOCK = 32
_BIAS = 127
_NAN = 255
"""Numbers of a block; what is added to exponents; the exponent of blocks that are not numbers."""

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""The 4-bit numbers E2M1, by their bits."""


class Mxfp4Tensor:
    """A weight in MXFP4, as a tensor in bfloat16, which holds each of its numbers exactly.

    `blocks` are the numbers, `uint8[E, out, in / 32, 16]`, `scales` the exponents without the last
    dim.
    """

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        self._blocks = blocks
        self._scales = scales
        experts, features, count, _ = blocks.shape
        self.shape: Shape = (experts, count * _BLOCK, features)

    def __getitem__(self, at: Index, /) -> np.ndarray:
        experts, inputs, features = at
        if inputs.stop <= inputs.start:
            return np.zeros([max(each.stop - each.start, 0) for each in at], jnp.bfloat16)
        # Blocks are decoded whole, and a slice may begin and end inside of them.
        first = inputs.start // _BLOCK
        last = -(-inputs.stop // _BLOCK)
        cut = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK)
        found: list[np.ndarray] = []
        for expert in range(experts.start, experts.stop):  # one at a time, to save memory
            where = slice(expert, expert + 1), features, slice(first, last)
            values = _decoded(self._blocks[(*where, slice(0, _BLOCK // 2))], self._scales[where])
            # Files have the outputs of a weight before its inputs.
            found.append(values[0, :, cut].T.astype(jnp.bfloat16))
        return np.stack(found)


def find_mxfp4(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> dict[str, Shape]:
    """Find weights in MXFP4 by the names, shapes and dtypes of tensors; returns their shapes."""
    found: dict[str, Shape] = {}
    for blocks, shape in shapes.items():
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _SCALES
        is_pair = blocks != name and name not in shapes and shapes.get(scales) == shape[:-1]
        are_bytes = dtypes[blocks] == dtypes.get(scales) == "U8"
        if is_pair and are_bytes and len(shape) == 4 and shape[-1] * 2 == _BLOCK:
            found[name] = (shape[0], shape[2] * _BLOCK, shape[1])
    return found


def stored_names(name: str) -> tuple[str, str]:
    """Return the names of the tensors that hold a weight."""
    return name + _BLOCKS, name + _SCALES


def _decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return `float32[..., in]`."""
    numbers = _NUMBERS[np.stack([blocks & 0xF, blocks >> 4], -1)]
    numbers = numbers.reshape(*scales.shape, _BLOCK)
    scales = scales[..., None]
    # Without the exponent that means NaN, with which `ldexp` would overflow in float32.
    factors = np.ldexp(np.float32(1), np.where(scales == _NAN, 0, scales.astype(np.int32) - _BIAS))
    values = numbers * np.where(scales == _NAN, np.float32(np.nan), factors)
    return values.reshape(*scales.shape[:-2], -1)
