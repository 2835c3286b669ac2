"""Cross entropy of a model that predicts several tokens at each position."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpipe.errors import LayerError

from ._cross_entropy import Logits, cross_entropy
from ._split_logits import signed


def multi_token_cross_entropy(  # noqa: PLR0913  # the arguments of `cross_entropy`, and a weight
    logits: Logits,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    extra_weight: float = 0.3,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Cross entropy of the next token and of the tokens after it.

    It can be used directly as `loss_fn` of `llama(config, multi_token=True)`. At depth k a position
    predicts the token that is k places after its label. With D extra depths, the loss is

        cross_entropy(depth 0) + extra_weight / D * sum(cross_entropy(depth k) for k in 1 to D)

    where all sums are divided by the weight of depth 0, as in the paper. So weights, ignored labels
    and the mean over microbatches and replicas mean the same as in `cross_entropy`.

    A position counts at depth k if its own label and the k labels after it all count. So the last k
    positions of a text do not count, also in packed texts, if the last label of each text is
    `ignore_index` or has weight 0.

    Args:
        logits: `[samples, 1 + D, length, vocab_size]`, whole or split over the stages. Depth 0
            comes first.
        labels: The next token of each position, `[samples, length]`, as for `cross_entropy`.
        weights: Weight of each label, `[samples, length]`, as for `cross_entropy`. At depth k, a
            position has the weight of the label that it predicts.
        extra_weight: Weight of the extra depths.
        ignore_index: As for `cross_entropy`.
        label_smoothing: As for `cross_entropy`.
        z_loss: As for `cross_entropy`.

    Returns:
        `(sum, weight, metrics)`. The metrics `next_token_loss` and `multi_token_loss` are the means
        at depth 0 and over the extra depths.

    Raises:
        LayerError: The logits have no dim of depths, or only one depth; `extra_weight` is negative;
            or another argument does not fit, as for `cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> logits, labels = jnp.zeros((1, 2, 3, 4)), jnp.array([[2, 0, 1]])
        >>> total, weight, metrics = multi_token_cross_entropy(logits, labels, extra_weight=0.3)
        >>> bool(jnp.allclose(total, (3 + 0.3 * 2) * jnp.log(4.0))), float(weight)
        (True, 3.0)

    Reference:
        DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
    """
    shape = getattr(logits, "shape", ())
    if len(shape) != 4 or shape[1] < 2:
        raise LayerError(
            "multi_token_cross_entropy must be given logits [samples, 1 + extra depths, length, "
            f"vocab_size], but got shape {list(shape)}. Build the model with llama(config, "
            "multi_token=True), or use cross_entropy."
        )
    if not extra_weight >= 0:
        raise LayerError(
            f"extra_weight must be at least 0, but got extra_weight={extra_weight!r}. Use for "
            "instance 0.3."
        )

    def at_depth(
        depth: int, labels: jax.Array, weights: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(
            logits[:, depth],
            labels,
            weights,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )

    total, weight = at_depth(0, labels, weights)
    labels = signed(jnp.asarray(labels))
    weights = None if weights is None else jnp.asarray(weights)
    extra = jnp.zeros_like(total)
    for depth in range(1, shape[1]):
        counts = labels != ignore_index
        if weights is not None:
            counts &= weights != 0
        labels = jnp.where(counts, _ahead(labels, ignore_index), ignore_index)
        weights = None if weights is None else _ahead(weights, 0)
        extra += at_depth(depth, labels, weights)[0] / (shape[1] - 1)
    metrics = {"next_token_loss": total / weight, "multi_token_loss": extra / weight}
    return total + extra_weight * extra, weight, metrics


def next_token_logits(logits: Any, ndim: int) -> Any:
    """The logits of depth 0 if there is a dim of depths: if there are more dims than `ndim`."""
    return logits[:, 0] if getattr(logits, "ndim", 0) == ndim + 1 else logits


def _ahead(values: jax.Array, fill: int) -> jax.Array:
    """The value of the next position at each position, `[samples, length]`."""
    # Whole before and after: where logits are divided along the positions, the shift would
    # otherwise be divided too, and move values between devices.
    return _whole(jnp.pad(_whole(values)[:, 1:], ((0, 0), (0, 1)), constant_values=fill))


def _whole(values: jax.Array) -> jax.Array:
    is_divided = bool(jax.sharding.get_abstract_mesh().auto_axes)
    return jax.lax.with_sharding_constraint(values, PartitionSpec()) if is_divided else values
