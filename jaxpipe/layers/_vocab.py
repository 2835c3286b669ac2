"""Embedding and head for a large vocabulary, which a pipeline splits over its stages.

A parameter whose partition metadata names the axis `stage` is split along that dim: every stage
holds one slice and runs the layer together with all other stages. From the shape of a parameter,
the layers here recognise whether it is whole, as on one device, or a slice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.distributed.topology import sum_over
from jaxpipe.layers.losses import local_indices, signed

from ._sharding import unbox

STAGE = "stage"


class VocabEmbed(nn.Module):
    """An embedding whose table a pipeline of several stages splits by rows.

    On one device it is equivalent to `flax.linen.Embed`, with the same parameter `embedding` and
    the same initial values. In a pipeline it must come before the first repeated layer. Each stage
    looks up the tokens whose rows it holds, and the results are summed over the stages.

    Args:
        num_embeddings: Number of rows of the table; `num_stages` must divide it.
        features: Length of a row.
        dtype: Dtype of the result; None uses the table's dtype.
        param_dtype: Dtype in which the table is made.
        embedding_init: Initialiser of the table.
        split: Whether a pipeline splits the table. If not, each stage that uses the table holds all
            of it.

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
        """Look up rows, `[..., features]`, the same on every stage, of `tokens` of any shape."""
        table = self._table()
        if table.shape[0] == self.num_embeddings:
            return jnp.take(table, tokens, axis=0)
        # As in `flax.linen.Embed`, negative values count from the end, and others out of range give
        # NaN.
        # A lookup in the whole table does this by itself.
        size = self.num_embeddings
        tokens = signed(tokens)
        tokens = jnp.where(tokens < 0, tokens + size, tokens)
        local, is_here = local_indices(tokens, table.shape[0], size)
        rows = jnp.take(table, local, axis=0)
        rows = sum_over(jnp.where(is_here[..., None], rows, jnp.zeros((), rows.dtype)), STAGE)
        is_row = (tokens >= 0) & (tokens < size)
        return jnp.where(is_row[..., None], rows, jnp.full((), jnp.nan, rows.dtype))

    @nn.compact
    def attend(self, x: jax.Array) -> jax.Array:
        """Logits from the embedding table, for a head tied to it through `forward_fn`.

        Args:
            x: `[..., features]`.

        Returns:
            `[..., num_embeddings]`, or this stage's slice of it.
        """
        table = self._table()
        dtype = jnp.result_type(x, table) if self.dtype is None else self.dtype
        return jnp.asarray(x, dtype) @ jnp.asarray(table, dtype).T

    def _table(self) -> jax.Array:
        shape = (self.num_embeddings, self.features)
        table = _split_param(self, "embedding", self.embedding_init, (STAGE, None), shape)
        return table if self.dtype is None else jnp.asarray(table, self.dtype)


class VocabHead(nn.Module):
    """A linear layer that computes logits and whose columns a pipeline splits over its stages.

    On one device it is equivalent to `flax.linen.Dense`, with the same parameters `kernel` and
    `bias` and the same initial values. In a pipeline it must come after the last repeated layer.
    Its result is then a slice of the logits, which the loss receives as
    `jaxpipe.losses.SplitLogits`. `predict` concatenates the slices.

    Args:
        num_embeddings: Number of logits; `num_stages` must divide it.
        use_bias: Whether to add a bias.
        dtype: Dtype of the computation; None uses the dtype that the input and the kernel promote
            to.
        param_dtype: Dtype in which the parameters are made.
        kernel_init: Initialiser of the kernel.
        bias_init: Initialiser of the bias.
        split: Whether a pipeline splits the parameters. If not, the stage that runs the layer holds
            all of them.

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
        """Logits `[..., num_embeddings]` of `x`, `[..., features]`, or this stage's slice."""
        kernel = _split_param(
            self, "kernel", self.kernel_init, (None, STAGE), (x.shape[-1], self.num_embeddings)
        )
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        logits = jnp.asarray(x, dtype) @ jnp.asarray(kernel, dtype)
        if self.use_bias:
            bias = _split_param(self, "bias", self.bias_init, (STAGE,), (self.num_embeddings,))
            logits = logits + jnp.asarray(bias, dtype).reshape((1,) * (logits.ndim - 1) + (-1,))
        return logits


@dataclass(frozen=True)
class SoftCapped:
    """A `forward_fn` for an output head, which limits its logits to `(-cap, cap)`.

    The logits become `cap * tanh(logits / cap)`, in their own dtype. Each logit depends on no
    other, so `pipeline.split_vocabulary` can split a head with this `forward_fn`.

    Args:
        cap: The limit.
        head: Makes the logits: `nn.Dense.__call__`, `nn.Embed.attend` for a tied embedding, or the
            same of NNX.

    Example:
        >>> import flax.linen as nn
        >>> from jaxpipe import LayerSpec
        >>> head = LayerSpec(nn.Dense, 8, forward_fn=SoftCapped(30.0))

    Reference:
        Gemma Team, "Gemma 2" (2024), section 2.
    """

    cap: float
    head: Callable[..., jax.Array] = nn.Dense.__call__

    def __call__(self, module: Any, inputs: jax.Array) -> jax.Array:
        """Compute the logits `[..., vocab_size]` of `inputs`, `[..., features]`."""
        return self.cap * jnp.tanh(self.head(module, inputs) / self.cap)


def _split_param(
    module: VocabEmbed | VocabHead,
    name: str,
    init: Callable[..., Any],
    spec: tuple[str | None, ...],
    shape: tuple[int, ...],
) -> jax.Array:
    """A parameter that is initialised whole, and may be passed in as a slice."""
    if module.has_variable("params", name):
        return jnp.asarray(unbox(module.get_variable("params", name)))
    init = nn.with_partitioning(init, spec) if module.split else init
    return unbox(module.param(name, init, shape, module.param_dtype))
