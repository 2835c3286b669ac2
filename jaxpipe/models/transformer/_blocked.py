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

from jaxpipe.layers.recompute import KERNEL
from jaxpipe.programs.jaxpr import ATTENTION_SCOPE, blocks_scope

BLOCK = 256
"""Positions in a block. With 16 heads and 8 samples, the scores of a pair of blocks are 32 MiB."""

_LOWEST = -1e30
"""Initial value of running maxima; finite, because differences of infinities are NaN."""


class Pattern(NamedTuple):
    """Static settings of attention.

    Attributes:
        window: Queries see only keys less than this many positions away. None means all.
        scale: Factor of the scores.
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
        key_segments: int32 `[B, S]`.
        key: For the dropout of probabilities.
    """

    mask: jax.Array | None = None
    lengths: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    key: jax.Array | None = None


class Operands(NamedTuple):
    """The arrays of one attention.

    Attributes:
        q: `[B, T, N, D]`.
        k: `[B, S, K, D]`.
        v: `[B, S, K, Dv]`.
        sinks: Floats `[N]`, or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    sinks: jax.Array | None = None
    visibility: Visibility = Visibility()


class Stripes(NamedTuple):
    """The positions of the queries and keys that one device holds.

    Query i is at position `i * stride + first_query`, and key j at `j * stride + first_key`.
    """

    stride: int = 1
    first_query: jax.Array | int = 0
    first_key: jax.Array | int = 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blocked_attention(pattern: Pattern, given: Operands) -> jax.Array:
    """Compute attention. Returns `[B, T, N, Dv]`, which is zero for queries that see no key."""
    return _forward(pattern, given)[0]


def _forward(pattern: Pattern, given: Operands) -> tuple[Any, Any]:
    q, k, v, sinks, visibility = given
    blocks = Blocks(pattern, q, k, visibility)
    sums = blocks.add(blocks.start(v, sinks), q, k, v)
    out, log_sum = named(*blocks.finish(sums, q.dtype))
    return out, (given, out, log_sum)


def _backward(pattern: Pattern, residuals: Any, grad: jax.Array) -> tuple[Any, ...]:
    (q, k, v, sinks, visibility), out, log_sum = residuals
    blocks = Blocks(pattern, q, k, visibility)
    rows = blocks.rows(out, log_sum, grad)
    grads = blocks.add_gradients(blocks.zero_gradients(q, k, v), q, k, v, grad, rows)
    dq, dk, dv = blocks.gradients(grads, (q, k, v))
    return (operand_gradients(dq, dk, dv, blocks.sink_gradient(sinks, rows)),)


def operand_gradients(dq: Any, dk: Any, dv: Any, to_sinks: Any) -> Operands:
    """Return gradients of the operands. Masks, lengths, segments and dropout keys have none."""
    nothing: Any = None
    return Operands(dq, dk, dv, to_sinks, nothing)


def named(out: jax.Array, log_sum: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Name the results of a forward, so that recompute can keep them and not run it again."""
    return checkpoint_name(out, KERNEL), checkpoint_name(log_sum, KERNEL)


blocked_attention.defvjp(_forward, _backward)


class Sums(NamedTuple):
    """Running maximum, sum and output of each query, in the layout of queries."""

    high: jax.Array
    total: jax.Array
    acc: jax.Array


class Rows(NamedTuple):
    """What the backward needs of each query, in the layout of queries, `[B, K, G, T, 1]`.

    `inner` is the sum over keys of each probability times its gradient.
    """

    log_sum: jax.Array
    inner: jax.Array


class Blocks:
    """The pairs of blocks whose queries see keys, and the layout of arrays for them.

    Queries are `[B, K, G, T, D]`, and keys and values are `[B, K, S, D or Dv]`, with `K` key heads
    that each serve `G` query heads. Both are padded to whole blocks. `stripes` says where the
    queries and keys are in the text.
    """

    def __init__(
        self,
        pattern: Pattern,
        q: jax.Array,
        k: jax.Array,
        visibility: Visibility,
        stripes: Stripes | None = None,
    ) -> None:
        self._pattern = pattern
        self._visibility = visibility
        self._stripes = Stripes() if stripes is None else stripes
        self._num_queries = q.shape[1]
        self._num_keys = k.shape[1]
        self._heads = k.shape[2]
        self._rows = min(BLOCK, self._num_queries)
        self._cols = min(BLOCK, self._num_keys)
        self._groups = q.shape[2] // k.shape[2]
        self._dtype = np.promote_types(q.dtype, np.float32)
        self._mask = None if visibility.mask is None else self._grouped(visibility.mask)

    @jax.named_scope(ATTENTION_SCOPE)
    def start(self, v: jax.Array, sinks: jax.Array | None) -> Sums:
        """Make the sums before the first key."""
        length = self._num_queries + -self._num_queries % self._rows
        shape = v.shape[0], self._heads, self._groups, length
        column = jnp.zeros((*shape, 1), self._dtype)
        high = column + _LOWEST
        total = column
        if sinks is not None:
            # A sink is a score of a value that is zero. So it is only in the maximum and in the
            # sum.
            sink = self._of_heads(sinks)
            high = jnp.maximum(high, sink)
            total = jnp.exp(sink - high)
        return Sums(high, total, jnp.zeros((*shape, v.shape[-1]), self._dtype))

    @jax.named_scope(ATTENTION_SCOPE)
    def add(self, sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array) -> Sums:
        """Add keys and values to the sums."""
        queries = self._queries(q)
        keys = self._keys(k)
        values = self._keys(v)

        def step(carry: Sums, i: jax.Array, j: jax.Array) -> Sums:
            high, total, acc = (self._query_block(x, i) for x in carry)
            scores, _ = self._scores(queries, keys, i, j)
            higher = jnp.maximum(high, scores.max(-1, keepdims=True))
            # The sums so far are relative to the old maximum.
            shrink = jnp.exp(high - higher)
            weights = jnp.exp(scores - higher)
            new = self._product(
                "bkgts,bksd->bkgtd", self._dropped(weights, i, j), self._key_block(values, j)
            )
            found = higher, total * shrink + weights.sum(-1, keepdims=True), acc * shrink + new
            return Sums(*(self._put_queries(x, y, i) for x, y in zip(carry, found, strict=True)))

        return self._loop(step, sums)

    @jax.named_scope(ATTENTION_SCOPE)
    def finish(self, sums: Sums, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return the output `[B, T, N, Dv]` and the logarithms of the sums, `[B, K, G, T]`."""
        # A query that sees no key has an empty sum, and gets zero instead of 0 / 0.
        sees = sums.total > 0
        total = jnp.where(sees, sums.total, 1.0)
        out = self._from_queries(jnp.where(sees, sums.acc / total, 0.0)).astype(dtype)
        return out, jnp.where(sees, sums.high + jnp.log(total), 0.0)[..., 0]

    @jax.named_scope(ATTENTION_SCOPE)
    def rows(self, out: jax.Array, log_sum: jax.Array, grad: jax.Array) -> Rows:
        """Return what the backward needs of each query, from the results of `finish`."""
        # The sum over keys of each probability times its gradient, computed without either
        # (FlashAttention-2, equation 4).
        wide = self._queries(out).astype(self._dtype)
        inner = (self._queries(grad).astype(self._dtype) * wide).sum(-1, keepdims=True)
        return Rows(log_sum[..., None], inner)

    @jax.named_scope(ATTENTION_SCOPE)
    def zero_gradients(
        self, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Make the gradients of queries, keys and values before the first key."""
        layouts = jax.eval_shape(lambda: (self._queries(q), self._keys(k), self._keys(v)))
        dq, dk, dv = (jnp.zeros(x.shape, self._dtype) for x in layouts)
        return dq, dk, dv

    @jax.named_scope(ATTENTION_SCOPE)
    def add_gradients(
        self,
        carry: tuple[jax.Array, jax.Array, jax.Array],
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        grad: jax.Array,
        rows: Rows,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Add the gradients from these keys and values to those of q, k and v."""
        queries = self._queries(q)
        grads = self._queries(grad)
        keys = self._keys(k)
        values = self._keys(v)

        def step(carry: tuple[jax.Array, ...], i: jax.Array, j: jax.Array) -> tuple[jax.Array, ...]:
            dq, dk, dv = carry
            query = self._query_block(queries, i)
            key = self._key_block(keys, j)
            grad = self._query_block(grads, i)
            value = self._key_block(values, j)
            scores, slope = self._scores(queries, keys, i, j)
            # Probabilities: the residual has the sum over all keys already.
            weights = jnp.exp(scores - self._query_block(rows.log_sum, i))
            to_values = self._product("bkgts,bkgtd->bksd", self._dropped(weights, i, j), grad)
            of_weights = self._dropped(self._product("bkgtd,bksd->bkgts", grad, value), i, j)
            # The derivative of the softmax, then that of the scale and the cap.
            of_scores = weights * (of_weights - self._query_block(rows.inner, i)) * slope
            to_queries = self._product("bkgts,bksd->bkgtd", of_scores, key)
            to_keys = self._product("bkgts,bkgtd->bksd", of_scores, query)
            return (
                self._put_queries(dq, self._query_block(dq, i) + to_queries, i),
                self._put_keys(dk, self._key_block(dk, j) + to_keys, j),
                self._put_keys(dv, self._key_block(dv, j) + to_values, j),
            )

        return self._loop(step, carry)

    @jax.named_scope(ATTENTION_SCOPE)
    def gradients(
        self, grads: tuple[jax.Array, jax.Array, jax.Array], like: tuple[jax.Array, ...]
    ) -> list[jax.Array]:
        """Convert the gradients of q, k and v to their shapes and dtypes."""
        found = self._from_queries(grads[0]), self._from_keys(grads[1]), self._from_keys(grads[2])
        return [x.astype(y.dtype) for x, y in zip(found, like, strict=True)]

    @jax.named_scope(ATTENTION_SCOPE)
    def sink_gradient(self, sinks: jax.Array | None, rows: Rows) -> jax.Array | None:
        """Return the gradient of the sinks, `[N]`; None if there are none."""
        if sinks is None:
            return None
        # The value of a sink is zero, and so is the gradient of its probability. Rows of padding
        # have no gradient.
        of_sinks = -jnp.exp(self._of_heads(sinks) - rows.log_sum) * rows.inner
        return of_sinks.sum((0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)

    def _loop(self, step: Callable[..., Any], carry: Any) -> Any:
        """Run `step(carry, query block, key block)` for all pairs that are not entirely hidden."""
        num_rows = -(-self._num_queries // self._rows)
        num_cols = -(-self._num_keys // self._cols)
        seen = [(i, j) for i in range(num_rows) for j in range(num_cols) if self._is_seen(i, j)]
        pairs = np.asarray(seen, np.int32).reshape(-1, 2)
        with jax.named_scope(blocks_scope(len(pairs), num_rows * num_cols)):
            return lax.scan(
                lambda carry, pair: (step(carry, pair[0], pair[1]), None), carry, jnp.asarray(pairs)
            )[0]

    def _is_seen(self, i: int, j: int) -> bool:
        first_row = i * self._rows
        last_row = (i + 1) * self._rows - 1
        first_col = j * self._cols
        last_col = (j + 1) * self._cols - 1
        # Positions of devices differ by less than a stride.
        stride = self._stripes.stride
        is_later = first_col - last_row > 0
        distance = max(first_row - last_col, first_col - last_row) * stride - (stride - 1)
        too_far = self._pattern.window is not None and distance >= self._pattern.window
        return not too_far and not (self._pattern.causal and is_later)

    def _queries(self, x: jax.Array) -> jax.Array:
        """Convert `[B, T, N, D]` to the layout of queries."""
        grouped = self._grouped(jnp.swapaxes(x, 1, 2))
        return filled(grouped, 3, self._rows)

    def _keys(self, x: jax.Array) -> jax.Array:
        """Convert `[B, S, K, D]` to the layout of keys."""
        return filled(jnp.swapaxes(x, 1, 2), 2, self._cols)

    def _of_heads(self, x: jax.Array) -> jax.Array:
        """Convert `[N]` to the layout of queries, `[1, K, G, 1, 1]`."""
        return x.astype(self._dtype).reshape(1, self._heads, -1, 1, 1)

    def _from_queries(self, x: jax.Array) -> jax.Array:
        """Convert the layout of queries back to `[B, T, N, D]`."""
        x = lax.slice_in_dim(x, 0, self._num_queries, axis=3)
        return jnp.swapaxes(x.reshape(x.shape[0], -1, *x.shape[3:]), 1, 2)

    def _from_keys(self, x: jax.Array) -> jax.Array:
        """Convert the layout of keys back to `[B, S, K, D]`."""
        return jnp.swapaxes(lax.slice_in_dim(x, 0, self._num_keys, axis=2), 1, 2)

    def _query_block(self, x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i * self._rows, self._rows, axis=3)

    def _key_block(self, x: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, j * self._cols, self._cols, axis=2)

    def _put_queries(self, x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block, i * self._rows, axis=3)

    def _put_keys(self, x: jax.Array, block: jax.Array, j: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, block, j * self._cols, axis=2)

    def _product(self, dims: str, weights: jax.Array, block: jax.Array) -> jax.Array:
        """Multiply in the dtype of q, k and v, with sums in at least float32."""
        return jnp.einsum(
            dims, weights.astype(block.dtype), block, preferred_element_type=self._dtype
        )

    def _scores(
        self, queries: jax.Array, keys: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array | float]:
        """Scores of a pair and their derivative by the products, both `[B, K, G, rows, cols]`."""
        query = self._query_block(queries, i)
        key = self._key_block(keys, j)
        scores = self._product("bkgtd,bksd->bkgts", query, key) * self._pattern.scale
        slope: jax.Array | float = self._pattern.scale
        if (cap := self._pattern.soft_cap) is not None:
            share = jnp.tanh(scores / cap)
            scores = cap * share
            slope = slope * (1 - share * share)
        stride, first_query, first_key = self._stripes
        rows = (i * self._rows + jnp.arange(self._rows)).reshape(1, 1, 1, -1, 1)
        cols = (j * self._cols + jnp.arange(self._cols)).reshape(1, 1, 1, 1, -1)
        visible = []
        # Padding is known by the index in this device's array, all else by the position in the
        # text.
        if self._num_keys % self._cols:
            visible.append(cols < self._num_keys)
        rows = rows * stride + first_query
        cols = cols * stride + first_key
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
        # The exponential of -inf is 0, so hidden keys have no weight.
        if visible:
            scores = jnp.where(functools.reduce(jnp.logical_and, visible), scores, -jnp.inf)
        return scores, slope

    def _dropped(self, weights: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        """Apply dropout to the probabilities of a pair, or to their gradients."""
        rate = self._pattern.dropout_rate
        key = self._visibility.key
        if not rate or key is None:
            return weights
        # Keyed by the pair, so that the forward and the backward drop the same entries.
        place = i * (-(-self._num_keys // self._cols)) + j
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
