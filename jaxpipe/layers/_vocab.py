"""Embedding, head and loss of a large vocabulary, which a pipeline splits over its stages.

A parameter whose partition metadata names the axis `stage` is split along that dim: every stage holds one slice, and
runs the layer together with all others. The layers here tell by the shape they are given whether a parameter is whole,
as on one device, or a slice.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import LayerError
from jaxpipe.topology import sum_over

from ._sharding import unbox

STAGE = "stage"


class VocabEmbed(nn.Module):
    """An embedding whose table a pipeline of several stages splits by rows.

    On one device it is `flax.linen.Embed`: the same parameter `embedding`, with the same initial values. In a pipeline
    it must be among the layers before the first repeated one. Each stage looks up the tokens whose rows it holds, and
    the results are summed over the stages.

    Args:
        num_embeddings: Rows of the table; `num_stages` must divide it.
        features: Length of a row.
        dtype: What the result is cast to; None: the table's own.
        param_dtype: What the table is made in.
        embedding_init: Makes the table.
        split: Whether a pipeline splits the table; otherwise it lies whole on the stages that use it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = VocabEmbed(8, 4)
        >>> params = layer.init(jax.random.key(0), jnp.zeros((2, 3), int))
        >>> layer.apply(params, jnp.zeros((2, 3), int)).shape
        (2, 3, 4)
    """

    num_embeddings: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = nn.Embed.embedding_init
    split: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Look up rows.

        Args:
            tokens: Integers in `[0, num_embeddings)`, of any shape. As in `flax.linen.Embed`
                negative ones count from the end, and others outside give NaN.

        Returns:
            Their rows, `[..., features]`, the same on every stage.
        """
        table = self._table()
        if table.shape[0] == self.num_embeddings:
            return jnp.take(table, tokens, axis=0)
        # What a lookup in the whole table does of itself.
        size = self.num_embeddings
        tokens = _wide(tokens)
        tokens = jnp.where(tokens < 0, tokens + size, tokens)
        local, is_here = _local(tokens, table.shape[0], size)
        rows = jnp.take(table, local, axis=0)
        rows = sum_over(jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)), STAGE)
        is_row = (tokens >= 0) & (tokens < size)
        return jnp.where(is_row[..., None], rows, jnp.full((), jnp.nan, rows.dtype))

    @nn.compact
    def attend(self, x: jax.Array) -> jax.Array:
        """Logits from the same table, for a head that is tied to the embedding through `forward_fn`.

        Args:
            x: `[..., features]`.

        Returns:
            `[..., num_embeddings]`, or this stage's slice of it, for `vocab_cross_entropy`.
        """
        table = self._table()
        dtype = jnp.result_type(x, table) if self.dtype is None else self.dtype
        return jnp.asarray(x, dtype) @ jnp.asarray(table, dtype).T

    def _table(self) -> jax.Array:
        shape = (self.num_embeddings, self.features)
        table = _split_param(self, "embedding", self.embedding_init, (STAGE, None), shape)
        return table if self.dtype is None else jnp.asarray(table, self.dtype)


class VocabHead(nn.Module):
    """A linear layer to logits whose columns a pipeline of several stages splits.

    On one device it is `flax.linen.Dense`: the same parameters `kernel` and `bias`, with the same initial values. In a
    pipeline it must be among the layers after the last repeated one; its result is then a slice of the logits, which
    `vocab_cross_entropy` takes. `predict` puts the slices together.

    Args:
        num_embeddings: Number of logits; `num_stages` must divide it.
        use_bias: Whether to add a bias.
        dtype: What it computes in; None: what the input and the kernel promote to.
        param_dtype: What the parameters are made in.
        kernel_init: Makes the kernel.
        bias_init: Makes the bias.
        split: Whether a pipeline splits them; otherwise they lie whole on the stage that runs the layer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer = VocabHead(8)
        >>> params = layer.init(jax.random.key(0), jnp.ones((2, 3, 4)))
        >>> layer.apply(params, jnp.ones((2, 3, 4))).shape
        (2, 3, 8)
    """

    num_embeddings: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.Dense.kernel_init
    bias_init: Callable[..., Any] = nn.Dense.bias_init
    split: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits, or this stage's slice of them.

        Args:
            x: `[..., features]`.

        Returns:
            `[..., num_embeddings]`, or a slice of the last dim.
        """
        kernel = _split_param(self, "kernel", self.kernel_init, (None, STAGE), (x.shape[-1], self.num_embeddings))
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        logits = jnp.asarray(x, dtype) @ jnp.asarray(kernel, dtype)
        if self.use_bias:
            bias = _split_param(self, "bias", self.bias_init, (STAGE,), (self.num_embeddings,))
            logits = logits + jnp.asarray(bias, dtype).reshape((1,) * (logits.ndim - 1) + (-1,))
        return logits


def vocab_cross_entropy(logits: jax.Array, labels: jax.Array, num_embeddings: int) -> jax.Array:
    """Cross entropy of each position, from whole logits or from this stage's slice of them.

    With slices, the largest logit, the sum of exponentials and the label's logit are reduced over the stages; the
    logits themselves never are. A `loss_fn` takes the mean, or returns a weighted sum and the sum of weights.

    Args:
        logits: `[..., num_embeddings]`, or a slice of the last dim. Computed with in float32, or wider.
        labels: Integers in `[0, num_embeddings)`, of the leading shape; what lies outside must be masked by the caller.
        num_embeddings: Number of all logits.

    Returns:
        `[...]`, the same on every stage.

    Raises:
        LayerError: The logits are neither whole nor an equal slice on each stage.

    Example:
        >>> import jax.numpy as jnp
        >>> float(vocab_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]), 4)[0]) == float(jnp.log(4.0))
        True

    Reference:
        Shoeybi et al., Megatron-LM (2019), section 3, with the vocabulary over pipeline stages.
    """
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    is_whole = logits.shape[-1] == num_embeddings
    local, is_here = _local(labels, logits.shape[-1], num_embeddings)

    def over_stages(reduce: Callable[..., jax.Array], value: jax.Array) -> jax.Array:
        return value if is_whole else reduce(value, STAGE)

    highest = over_stages(jax.lax.pmax, jax.lax.stop_gradient(logits.max(-1)))
    total = over_stages(sum_over, jnp.exp(logits - highest[..., None]).sum(-1))
    found = jnp.take_along_axis(logits, local[..., None], axis=-1)[..., 0]
    right = over_stages(sum_over, jnp.where(is_here, found, 0.0))
    return jnp.log(total) + highest - right


def _split_param(
    module: VocabEmbed | VocabHead,
    name: str,
    init: Callable[..., Any],
    spec: tuple[str | None, ...],
    shape: tuple[int, ...],
) -> jax.Array:
    """A parameter that may be given as a slice; made whole."""
    if module.has_variable("params", name):
        return jnp.asarray(unbox(module.get_variable("params", name)))
    init = nn.with_partitioning(init, spec) if module.split else init
    return unbox(module.param(name, init, shape, module.param_dtype))


def _local(indices: jax.Array, size: int, num_embeddings: int) -> tuple[jax.Array, jax.Array]:
    """Indices into this stage's slice, or the whole; 0 where they point elsewhere, and whether they point into it."""
    local = indices = _wide(indices)
    if size != num_embeddings:
        num_stages = _num_stages()
        if size * num_stages != num_embeddings:
            raise LayerError(
                f"a dim of num_embeddings={num_embeddings} must be given whole, or in equal slices to all stages, but "
                f"got {size} on {num_stages or 'no'} stages. Give num_embeddings as the layers have it."
            )
        local = indices - size * jax.lax.axis_index(STAGE).astype(indices.dtype)
    is_here = (local >= 0) & (local < size)
    return jnp.where(is_here, local, 0), is_here


def _wide(indices: jax.Array) -> jax.Array:
    """Indices, wide enough for sums with the size of a vocabulary, and signed."""
    return indices.astype(jnp.promote_types(indices.dtype, jnp.int32))


def _num_stages() -> int:
    try:
        return jax.lax.axis_size(STAGE)
    except NameError:
        return 0
