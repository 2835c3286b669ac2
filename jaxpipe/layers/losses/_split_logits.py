"""Logits that are split over the stages, each of which holds a slice of the vocabulary."""

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed.topology import sum_over
from jaxpipe.errors import LayerError

STAGE = "stage"


class SplitLogits:
    """Logits that are split over the stages, as a loss gets them when the model's head is split.

    Pass them to `cross_entropy` or `vocab_cross_entropy`. Leading dims may be indexed and reshaped,
    and the dtype changed. All other operations fail, because they would mistake one slice of the
    vocabulary for all of it. This is not an array, and `jax.jit` does not accept it.

    Args:
        local: This stage's slice, `[..., vocab_size / num_stages]`.
        vocab_size: Number of all logits.

    Attributes:
        local: This stage's slice, for losses that use their own collectives over `"stage"`.
        shape: Shape of the whole logits, `[..., vocab_size]`.
    """

    # Without this, Python would iterate with `__getitem__`.
    __iter__ = None

    def __init__(self, local: jax.Array, vocab_size: int) -> None:
        self.local = local
        self.shape = (*local.shape[:-1], vocab_size)

    def __repr__(self) -> str:
        return f"SplitLogits({self.dtype.name}{list(self.shape)})"

    @property
    def dtype(self) -> Any:
        """Dtype of the logits."""
        return self.local.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.local.ndim

    def astype(self, dtype: Any) -> "SplitLogits":
        """The same logits in another dtype."""
        return SplitLogits(self.local.astype(dtype), self.shape[-1])

    def __getitem__(self, index: Any) -> "SplitLogits":
        """Index leading dims, such as `logits[:, :-1]`."""
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) >= self.ndim or any(
            x is None or isinstance(x, EllipsisType) for x in entries
        ):
            raise LayerError(
                "an index of split logits must leave out their last dim, which is split over the "
                f"stages, but got {index!r} for shape {list(self.shape)}. Index the dims before "
                "it, such as logits[:, :-1]."
            )
        return SplitLogits(self.local[index], self.shape[-1])

    def reshape(self, *shape: Any) -> "SplitLogits":
        """Reshape leading dims, such as `logits.reshape(-1, vocab_size)`.

        Raises:
            LayerError: The last dim of the result is not the vocabulary dim.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not sizes or sizes[-1] != self.shape[-1]:
            raise LayerError(
                f"a reshape of split logits must keep their last dim, {self.shape[-1]}, but got "
                f"{list(sizes)}. Write for instance logits.reshape(-1, {self.shape[-1]})."
            )
        return SplitLogits(self.local.reshape(*sizes[:-1], self.local.shape[-1]), self.shape[-1])


def put_together(logits: Any) -> jax.Array:
    """The whole logits, computed so that the transpose gives each stage its slice's cotangent."""
    if not isinstance(logits, SplitLogits):
        return logits
    start = jax.lax.axis_index(STAGE) * logits.local.shape[-1]
    nothing = jnp.zeros(logits.shape, logits.dtype)
    placed = jax.lax.dynamic_update_slice_in_dim(nothing, logits.local, start, axis=logits.ndim - 1)
    return sum_over(placed, STAGE)


def over_samples(
    function: Callable[[PyTree, PyTree], PyTree], outputs: PyTree, labels: PyTree
) -> PyTree:
    """Apply a function of outputs and labels to each sample, as microbatches of one."""
    leaves, treedef = jax.tree.flatten(outputs, is_leaf=lambda x: isinstance(x, SplitLogits))
    sizes = [x.shape[-1] if isinstance(x, SplitLogits) else None for x in leaves]

    def one(locals_: list[jax.Array], labels: PyTree) -> PyTree:
        alone = [
            x[None] if size is None else SplitLogits(x[None], size)
            for x, size in zip(locals_, sizes, strict=True)
        ]
        return function(jax.tree.unflatten(treedef, alone), jax.tree.map(lambda x: x[None], labels))

    arrays = [x.local if isinstance(x, SplitLogits) else x for x in leaves]
    # The first dim of all leaves, split logits too, is the samples, also in the result.
    return jax.vmap(one)(arrays, labels)


def local_indices(
    indices: jax.Array, local_size: int, whole_size: int
) -> tuple[jax.Array, jax.Array]:
    """Indices into this stage's slice of a dim, or the whole dim, and whether each is inside it."""
    local = indices = signed(indices)
    if local_size != whole_size:
        num_stages = _num_stages()
        if local_size * num_stages != whole_size:
            raise LayerError(
                f"a dim of num_embeddings={whole_size} must be given whole, or in equal slices to "
                f"all stages, but got {local_size} on {num_stages or 'no'} stages. Give the "
                "num_embeddings of the layers."
            )
        local = indices - local_size * jax.lax.axis_index(STAGE).astype(indices.dtype)
    is_here = (local >= 0) & (local < local_size)
    # A valid index in any case, because the value is masked and not the lookup.
    return jnp.where(is_here, local, 0), is_here


def signed(indices: jax.Array) -> jax.Array:
    """Indices in a signed dtype that is wide enough for sums with the size of a vocabulary."""
    # NumPy's rule, because JAX's own refuses to promote if promotion is strict.
    return indices.astype(jax.dtypes.canonicalize_dtype(np.promote_types(indices.dtype, np.int32)))


def _num_stages() -> int:
    try:
        return jax.lax.axis_size(STAGE)
    except NameError:
        return 0
