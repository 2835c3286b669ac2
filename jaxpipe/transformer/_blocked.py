"""Attention in blocks of queries and keys, in plain JAX, with a custom derivative.

The softmax is computed with a running maximum and sum, so no array has both queries and keys beyond
one block. The backward recomputes the scores of each block from the residuals: q, k, v, the output,
and the logarithm of each row's sum.

Reference:
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021); Dao, "FlashAttention-2"
    (2023), section 3.1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.jaxpr import ATTENTION_SCOPE, blocks_scope
from jaxpipe.recompute import KERNEL

BLOCK = 256
"""Positions in a block. With 16 heads and 8 samples, the scores of a pair of blocks are 32 MiB."""

_LOWEST = -1e30
"""Initial value of running maxima; finite, because differences of infinities are NaN."""


class Pattern(NamedTuple):
    """Static settings of attention.

    Attributes:
        causal: Whether queries see only keys up to their own position.
        window: Queries see only keys less than this many positions away. None means all.
        scale: Factor of the scores.
        dropout_rate: Fraction of the probabilities that are dropped.
        soft_cap: Scores `s` become `soft_cap * tanh(s / soft_cap)`. None means no cap.
    """

    causal: bool
    window: int | None
    scale: float
    dropout_rate: float
    soft_cap: float | None = None


class Visibility(NamedTuple):
    """Arrays that hide keys from queries; all None if only the pattern hides keys.

    Attributes:
        mask: `[B or 1, N or 1, T or 1, S or 1]`. Either booleans, true where a query sees a key, or
            numbers that are added to the scores.
        lengths: int32 `[B]`. Keys from this position on are hidden.
        query_segments: int32 `[B, T]`. Queries see only keys of the same segment.
        key_segments: int32 `[B, S]`, the segments of keys.
        key: Key for the dropout of probabilities.
    """

    mask: jax.Array | None = None
    lengths: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_attention(
    pattern: Pattern,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    visibility: Visibility,
) -> jax.Array:
    """Compute attention of `q` `[B, T, N, D]` to `k` `[B, S, K, D]` and `v` `[B, S, K, Dv]`.

    `sinks` are floats `[N]`, or None. Returns `[B, T, N, Dv]`, which is zero for queries that see
    no key.
    """
    return _forward(pattern, q, k, v, sinks, visibility)[0]


@jax.named_scope(ATTENTION_SCOPE)
def _forward(
    pattern: Pattern,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    visibility: Visibility,
) -> tuple[Any, Any]:
    blocks = _Blocks(pattern, q, k, visibility)
    queries, keys, values = blocks.queries(q), blocks.keys(k), blocks.keys(v)

    def step(carry: tuple[jax.Array, ...], i: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
        high, total, acc = (blocks.query_block(x, i) for x in carry)
        scores, _ = blocks.scores(queries, keys, i, j)
        higher = jnp.maximum(high, scores.max(-1, keepdims=True))
        shrink, weights = jnp.exp(high - higher), jnp.exp(scores - higher)
        new = blocks.product(
            "bkgts,bksd->bkgtd", blocks.dropped(weights, i, j), blocks.key_block(values, j)
        )
        found = higher, total * shrink + weights.sum(-1, keepdims=True), acc * shrink + new
        return tuple(blocks.put_queries(x, y, i) for x, y in zip(carry, found, strict=True))

    column = jnp.zeros((*queries.shape[:-1], 1), blocks.dtype)
    high, total = column + _LOWEST, column
    if sinks is not None:
        # A sink is a score of a value that is zero. So it is only in the maximum and in the sum.
        sink = blocks.of_heads(sinks)
        high = jnp.maximum(high, sink)
        total = jnp.exp(sink - high)
    acc = jnp.zeros((*queries.shape[:-1], v.shape[-1]), blocks.dtype)
    high, total, acc = blocks.loop(step, (high, total, acc))
    sees = total > 0
    out = blocks.from_queries(jnp.where(sees, acc / jnp.where(sees, total, 1.0), 0.0)).astype(
        q.dtype
    )
    log_sum = jnp.where(sees, high + jnp.log(jnp.where(sees, total, 1.0)), 0.0)
    # Named so that a policy can keep both; recompute then does not run this again.
    out, log_sum = checkpoint_name(out, KERNEL), checkpoint_name(log_sum[..., 0], KERNEL)
    return out, (q, k, v, sinks, visibility, out, log_sum)


@jax.named_scope(ATTENTION_SCOPE)
def _backward(pattern: Pattern, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    q, k, v, sinks, visibility, out, log_sum = residuals
    blocks = _Blocks(pattern, q, k, visibility)
    queries, keys, values, grads = (
        blocks.queries(q),
        blocks.keys(k),
        blocks.keys(v),
        blocks.queries(grad),
    )
    # The sum over keys of each probability times its gradient, computed without either
    # (FlashAttention-2, equation 4).
    wide = blocks.queries(out).astype(blocks.dtype)
    inner = (grads.astype(blocks.dtype) * wide).sum(-1, keepdims=True)
    log_sum = log_sum[..., None]

    def step(carry: tuple[jax.Array, ...], i: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
        dq, dk, dv = carry
        query, key = blocks.query_block(queries, i), blocks.key_block(keys, j)
        grad, value = blocks.query_block(grads, i), blocks.key_block(values, j)
        scores, slope = blocks.scores(queries, keys, i, j)
        weights = jnp.exp(scores - blocks.query_block(log_sum, i))
        to_values = blocks.product("bkgts,bkgtd->bksd", blocks.dropped(weights, i, j), grad)
        of_weights = blocks.dropped(blocks.product("bkgtd,bksd->bkgts", grad, value), i, j)
        of_scores = weights * (of_weights - blocks.query_block(inner, i)) * slope
        to_queries = blocks.product("bkgts,bksd->bkgtd", of_scores, key)
        to_keys = blocks.product("bkgts,bkgtd->bksd", of_scores, query)
        return (
            blocks.put_queries(dq, blocks.query_block(dq, i) + to_queries, i),
            blocks.put_keys(dk, blocks.key_block(dk, j) + to_keys, j),
            blocks.put_keys(dv, blocks.key_block(dv, j) + to_values, j),
        )

    dq, dk, dv = blocks.loop(
        step, tuple(jnp.zeros(x.shape, blocks.dtype) for x in (queries, keys, values))
    )
    found = blocks.from_queries(dq), blocks.from_keys(dk), blocks.from_keys(dv)
    to_sinks = None
    if sinks is not None:
        # The value of a sink is zero, and so is the gradient of its probability. Padding has none.
        of_sinks = -jnp.exp(blocks.of_heads(sinks) - log_sum) * inner
        to_sinks = of_sinks.sum((0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)
    # None because masks, lengths, segments and dropout keys have no gradient.
    return *(x.astype(like.dtype) for x, like in zip(found, (q, k, v), strict=True)), to_sinks, None


blocked_attention.defvjp(_forward, _backward)


class _Blocks:
    """The pairs of blocks whose queries see keys, and the layout of arrays for them.

    Queries are `[B, K, G, T, D]`, and keys and values are `[B, K, S, D or Dv]`, with `K` key heads
    that each serve `G` query heads. Both are padded to whole blocks.
    """

    def __init__(
        self, pattern: Pattern, q: jax.Array, k: jax.Array, visibility: Visibility
    ) -> None:
        self._pattern, self._visibility = pattern, visibility
        self.num_queries, self.num_keys, self._heads = q.shape[1], k.shape[1], k.shape[2]
        self._rows, self._cols = min(BLOCK, self.num_queries), min(BLOCK, self.num_keys)
        self.dtype = np.promote_types(q.dtype, np.float32)
        self._mask = None if visibility.mask is None else self._grouped(visibility.mask)

    def loop(self, step: Callable[..., Any], carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Run `step(carry, query block, key block)` for all pairs that are not entirely hidden."""
        num_rows, num_cols = -(-self.num_queries // self._rows), -(-self.num_keys // self._cols)
        seen = [(i, j) for i in range(num_rows) for j in range(num_cols) if self._is_seen(i, j)]
        pairs = np.asarray(seen, np.int32).reshape(-1, 2)
        with jax.named_scope(blocks_scope(len(pairs), num_rows * num_cols)):
            return lax.scan(
                lambda carry, pair: (step(carry, pair[0], pair[1]), None), carry, jnp.asarray(pairs)
            )[0]

    def _is_seen(self, i: int, j: int) -> bool:
        first_row, last_row = i * self._rows, (i + 1) * self._rows - 1
        first_col, last_col = j * self._cols, (j + 1) * self._cols - 1
        is_later = first_col - last_row > 0
        distance = max(first_row - last_col, first_col - last_row)
        too_far = self._pattern.window is not None and distance >= self._pattern.window
        return not too_far and not (self._pattern.causal and is_later)

    def queries(self, x: jax.Array) -> jax.Array:
        """Convert `[B, T, N, D]` to the layout of queries."""
        grouped = self._grouped(jnp.swapaxes(x, 1, 2))
        return filled(grouped, 3, self._rows)

    def keys(self, x: jax.Array) -> jax.Array:
        """Convert `[B, S, K, D]` to the layout of keys."""
        return filled(jnp.swapaxes(x, 1, 2), 2, self._cols)

    def of_heads(self, x: jax.Array) -> jax.Array:
        """Convert `[N]` to the layout of queries, `[1, K, G, 1, 1]`."""
        return x.astype(self.dtype).reshape(1, self._heads, -1, 1, 1)

    def from_queries(self, x: jax.Array) -> jax.Array:
        """Convert the layout of queries back to `[B, T, N, D]`."""
        x = lax.slice_in_dim(x, 0, self.num_queries, axis=3)
        return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[3:]), 1, 2)

    def from_keys(self, x: jax.Array) -> jax.Array:
        """Convert the layout of keys back to `[B, S, K, D]`."""
        return jnp.swapaxes(lax.slice_in_dim(x, 0, self.num_keys, axis=2), 1, 2)

    def query_block(self, x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self._rows, self._rows, axis=3)

    def key_block(self, x: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self._cols, self._cols, axis=2)

    def put_queries(self, x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block, i * self._rows, axis=3)

    def put_keys(self, x: jax.Array, block: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block, j * self._cols, axis=2)

    def product(self, dims: str, weights: jax.Array, block: jax.Array) -> jax.Array:
        """Multiply in the dtype of q, k and v, with sums in at least float32."""
        return jnp.einsum(
            dims, weights.astype(block.dtype), block, preferred_element_type=self.dtype
        )

    def scores(
        self, queries: jax.Array, keys: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        """Compute the scores of a pair, and their derivative by the products of queries and keys.

        Both are `[B, K, G, rows, cols]`. The scores are -inf where a key is hidden.
        """
        query, key = self.query_block(queries, i), self.key_block(keys, j)
        scores = self.product("bkgtd,bksd->bkgts", query, key) * self._pattern.scale
        slope: jax.Array | float = self._pattern.scale
        if (cap := self._pattern.soft_cap) is not None:
            share = jnp.tanh(scores / cap)
            scores, slope = cap * share, slope * (1 - share * share)
        rows = (i * self._rows + jnp.arange(self._rows)).reshape(1, 1, 1, -1, 1)
        cols = (j * self._cols + jnp.arange(self._cols)).reshape(1, 1, 1, 1, -1)
        visible = []
        if self.num_keys % self._cols:
            visible.append(cols < self.num_keys)
        if self._pattern.causal:
            visible.append(cols <= rows)
        if self._pattern.window is not None:
            visible.append(jnp.abs(rows - cols) < self._pattern.window)
        if self._visibility.lengths is not None:
            visible.append(cols < self._visibility.lengths.reshape(-1, 1, 1, 1, 1))
        if (
            self._visibility.query_segments is not None
            and self._visibility.key_segments is not None
        ):
            of_rows = self._segments(self._visibility.query_segments, i, self._rows)
            of_cols = self._segments(self._visibility.key_segments, j, self._cols)
            visible.append(of_rows[:, None, None, :, None] == of_cols[:, None, None, None, :])
        if self._mask is not None:
            mask = self._mask_block(self._mask, i, j)
            if mask.dtype == jnp.bool_:
                visible.append(mask)
            else:
                scores = scores + mask.astype(scores.dtype)
        if visible:
            scores = jnp.where(functools.reduce(jnp.logical_and, visible), scores, -jnp.inf)
        return scores, slope

    def dropped(self, weights: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Apply dropout to the probabilities of a pair, or to their gradients.

        The forward and the backward drop the same entries.
        """
        rate, key = self._pattern.dropout_rate, self._visibility.key
        if not rate or key is None:
            return weights
        place = i * (-(-self.num_keys // self._cols)) + j
        keep = jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, weights.shape)
        return jnp.where(keep, weights / (1.0 - rate), 0.0)

    def _grouped(self, x: jax.Array) -> jax.Array:
        """Reshape `[B, N or 1, ...]` to `[B, K or 1, G or 1, ...]`."""
        heads = (self._heads, -1) if x.shape[1] > 1 else (1, 1)
        return x.reshape(x.shape[0], *heads, *x.shape[2:])

    def _segments(self, x: jax.Array, place: jax.Array, size: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(filled(x, 1, size), place * size, size, axis=1)

    def _mask_block(self, mask: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        for dim, place, size in ((3, i, self._rows), (4, j, self._cols)):
            if mask.shape[dim] > 1:
                mask = lax.dynamic_slice_in_dim(
                    filled(mask, dim, size), place * size, size, axis=dim
                )
        return mask


def filled(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Pad an array with zeros to a multiple of `size` along a dim."""
    missing = -x.shape[dim] % size
    return jnp.pad(x, [(0, missing if d == dim else 0) for d in range(x.ndim)]) if missing else x
