"""Cross entropy from whole logits, or from slices of them that are never gathered."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpipe._util.numbers import as_integer
from jaxpipe.distributed.topology import sum_over
from jaxpipe.errors import LayerError, shown

from ._split_logits import STAGE, SplitLogits, local_indices, signed

Logits = jax.Array | SplitLogits


def cross_entropy(
    logits: Logits,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of a language model, summed over the positions that count, and their number.

    It can be used directly as `loss_fn`. The loss of a batch is then the mean over all positions
    that count, no matter how they are distributed over microbatches and replicas. With a `loss_fn`
    that calls it, `pipeline.split_vocabulary` can split the model's head over the stages. The loss
    at each position is

        (1 - label_smoothing) * -log p[label] + label_smoothing * mean(-log p) + z_loss *
        log(sum(exp(logits)))**2

    Args:
        logits: `[..., vocab_size]`, whole or split over the stages. The computation uses float32 or
            wider.
        labels: Integers in `[0, vocab_size)`, or `ignore_index`, of shape `[...]`. Other values
            give NaN.
        weights: Weight of each position, `[...]`, numbers or booleans; None weights all positions
            by 1. Labels with weight 0 may have any value.
        ignore_index: The label that marks positions that do not count.
        label_smoothing: Fraction of the target probability that is spread evenly over the
            vocabulary, in `[0, 1]`.
        z_loss: Factor of the squared log of the softmax's normaliser, which keeps logits from
            drifting; PaLM uses 1e-4.

    Returns:
        `(sum, weight)`, each `float32[]`: the weighted sum over the positions, and the sum of their
        weights.

    Raises:
        LayerError: Labels are not integers, shapes do not fit, or a factor is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> total, weight = cross_entropy(jnp.zeros((1, 3, 4)), jnp.array([[2, 0, -100]]))
        >>> bool(jnp.allclose(total / weight, jnp.log(4.0))), float(weight)
        (True, 2.0)

    Reference:
        Names as in `torch.nn.functional.cross_entropy`; label smoothing: Szegedy et al. (2016),
        section 7; z-loss: Chowdhery et al., PaLM (2022), section 5; the split: Shoeybi et al.,
        Megatron-LM (2019), section 3.
    """
    _check(logits, labels, weights, label_smoothing, z_loss)
    labels = _whole(signed(jnp.asarray(labels)))
    counted = labels != ignore_index
    if weights is not None:
        counted &= weights != 0
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    terms = _reduced(logits, jnp.where(is_class, labels, 0), needs_mean=label_smoothing > 0)
    losses = (
        terms.log_normaliser - (1 - label_smoothing) * terms.of_label - label_smoothing * terms.mean
    )
    losses += z_loss * terms.log_normaliser**2
    # NaN, not 0: an invalid label must not be mistaken for an ignored one.
    losses = jnp.where(counted, jnp.where(is_class, losses, jnp.nan), 0.0)
    if weights is None:
        return losses.sum(), counted.sum(dtype=losses.dtype)
    factors = jnp.where(counted, weights, 0).astype(losses.dtype)
    return (losses * factors).sum(), factors.sum()


def vocab_cross_entropy(
    logits: Logits, labels: jax.Array, num_embeddings: int | None = None
) -> jax.Array:
    """Cross entropy of each position, from whole or split logits, for custom losses.

    With split logits, the largest logit, the sum of exponentials and the label's logit are reduced
    over the stages, but never the logits themselves. A `loss_fn` takes the mean of the result, or
    returns a weighted sum and the sum of weights.

    Args:
        logits: `[..., num_embeddings]`, whole or split over the stages. The computation uses
            float32 or wider.
        labels: Integers in `[0, num_embeddings)`, of the leading shape. The caller must mask values
            out of this range.
        num_embeddings: Number of all logits, if an array may be this stage's slice of them, as in a
            custom `shard_map`. None means that an array is whole.

    Returns:
        `[...]`, the same on every stage.

    Raises:
        LayerError: The logits are neither whole nor an equal slice on each stage.

    Example:
        >>> import jax.numpy as jnp
        >>> float(vocab_cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))[0]) == float(jnp.log(4.0))
        True

    Reference:
        Shoeybi et al., Megatron-LM (2019), section 3, with the vocabulary over pipeline stages.
    """
    if num_embeddings is not None and not isinstance(logits, SplitLogits):
        logits = SplitLogits(logits, num_embeddings)
    terms = _reduced(logits, labels, needs_mean=False)
    return terms.log_normaliser - terms.of_label


def log_probs(
    logits: Logits,
    labels: jax.Array,
    segment_ids: jax.Array | None = None,
    num_segments: int | None = None,
    *,
    ignore_index: int = -100,
) -> jax.Array:
    """Log-probabilities of the labels, summed over the positions of each sample that count.

    Use it for losses that compare whole answers, such as preference tuning. The computation uses
    float32 or wider. For a model that is not trained, use `engine.log_probs`.

    Args:
        logits: `[samples, ..., vocab_size]`, whole or split over the stages.
        labels: Integers in `[0, vocab_size)`, or `ignore_index`, of the leading shape. Other values
            give NaN.
        segment_ids: The answer that each position belongs to, counted from 0, if several answers
            are packed into a sample. Integers of the shape of the labels. Positions with other
            values, such as -1, do not count.
        num_segments: Number of answers in a sample; only with `segment_ids`.
        ignore_index: The label that marks positions that do not count.

    Returns:
        `[samples]`, or `[samples, num_segments]` with `segment_ids`.

    Raises:
        LayerError: Labels or segments are not integers of the leading shape, or `segment_ids` is
            given and `num_segments` is not a positive integer.

    Example:
        >>> import jax.numpy as jnp
        >>> found = log_probs(jnp.zeros((1, 3, 4)), jnp.array([[2, 0, -100]]))
        >>> bool(jnp.allclose(found, -2 * jnp.log(4.0)))
        True

    Reference:
        The quantity that Rafailov et al., Direct Preference Optimization (2023), section 4,
        compare.
    """
    _check(logits, labels, None, 0.0, 0.0)
    _check_segments(labels, segment_ids, num_segments)
    labels = _whole(signed(jnp.asarray(labels)))
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    values = -vocab_cross_entropy(logits, jnp.where(is_class, labels, 0))
    values = jnp.where(labels != ignore_index, jnp.where(is_class, values, jnp.nan), 0.0)
    inner = tuple(range(1, labels.ndim))
    if segment_ids is None:
        return values.sum(inner)
    assert num_segments is not None  # checked above
    is_of = jax.nn.one_hot(segment_ids, num_segments, dtype=jnp.bool_)
    # Select instead of multiplying: values that do not count may be NaN.
    return jnp.where(is_of, values[..., None], 0.0).sum(inner)


class _Reduced(NamedTuple):
    """What a loss needs from the logits of each position, equal on all stages, `[...]`.

    Attributes:
        log_normaliser: Log of the sum of exponentials.
        of_label: The label's logit; 0 where the label is not a class.
        mean: Mean of the logits; 0 if it is not needed.
    """

    log_normaliser: jax.Array
    of_label: jax.Array
    mean: jax.Array


def _reduced(logits: Logits, labels: jax.Array, *, needs_mean: bool) -> _Reduced:
    local = logits.local if isinstance(logits, SplitLogits) else logits
    local = local.astype(np.promote_types(local.dtype, np.float32))
    vocab_size = logits.shape[-1]
    is_whole = local.shape[-1] == vocab_size
    indices, is_here = local_indices(labels, local.shape[-1], vocab_size)

    def over_stages(reduce: Callable[..., jax.Array], value: jax.Array) -> jax.Array:
        return value if is_whole else reduce(value, STAGE)

    highest = over_stages(jax.lax.pmax, jax.lax.stop_gradient(local.max(-1)))
    total = over_stages(sum_over, jnp.exp(local - highest[..., None]).sum(-1))
    found = jnp.take_along_axis(local, indices[..., None], axis=-1)[..., 0]
    of_label = over_stages(sum_over, jnp.where(is_here, found, 0.0))
    mean = (
        over_stages(sum_over, local.sum(-1)) / vocab_size
        if needs_mean
        else jnp.zeros_like(of_label)
    )
    return _Reduced(jnp.log(total) + highest, of_label, mean)


def _whole(labels: jax.Array) -> jax.Array:
    """Keep labels whole over automatic axes."""
    # If XLA divided labels that were shifted, such as `labels[:, 1:]`, it would move slices of them
    # between devices.
    has_axes = bool(jax.sharding.get_abstract_mesh().auto_axes)
    return jax.lax.with_sharding_constraint(labels, P()) if has_axes else labels


def _check_segments(labels: Any, segment_ids: Any, num_segments: Any) -> None:
    count = as_integer(num_segments, 1)
    if segment_ids is None and num_segments is None:
        return
    dtype: Any = getattr(segment_ids, "dtype", None)
    shape = getattr(segment_ids, "shape", None)
    if (
        shape != labels.shape
        or dtype is None
        or not jnp.issubdtype(dtype, jnp.integer)
        or count is None
    ):
        found = "None" if dtype is None else f"{dtype}{list(shape or ())}"
        raise LayerError(
            f"segment_ids must be integers of the shape of the labels, {list(labels.shape)}, and "
            f"num_segments their number, but got segment_ids={found} and num_segments="
            f"{num_segments!r}. Number the answers of each sample from 0, and give -1 to positions "
            "outside any answer."
        )


def _check(logits: Any, labels: Any, weights: Any, label_smoothing: Any, z_loss: Any) -> None:
    if not logits.ndim:
        raise LayerError(
            f"logits must be an array [..., vocab_size], but got {shown(logits)}. Pass the model's "
            "output, or the entry of it that holds the logits."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise LayerError(
            "labels must be integers, the number of a class for each position, but got "
            f"{labels.dtype}. Pass jnp.argmax of one-hot labels, or optax.softmax_cross_entropy "
            "where labels are probabilities."
        )
    shape = logits.shape[:-1]
    if labels.shape != shape and labels.shape == shape[:1] + shape[2:]:
        raise LayerError(
            "the labels of a loss for the next token must have the shape of the logits without "
            f"their last dim, but got logits of {shape[1]} tokens at each position: "
            f"{list(logits.shape)} for labels {list(labels.shape)}. Use multi_token_cross_entropy, "
            "or index logits[:, 0]."
        )
    if labels.shape != shape:
        raise LayerError(
            f"labels must have the shape of the logits without their last dim, {list(shape)}, but "
            f"got {list(labels.shape)}. Shift labels in the data, or index both: logits[:, "
            ":-1] and labels[:, 1:]."
        )
    if weights is not None and weights.shape != shape:
        raise LayerError(
            f"weights must be an array of the shape of the labels, {list(shape)}, but got "
            f"{list(weights.shape)}. Broadcast them with jnp.broadcast_to."
        )
    if not 0 <= label_smoothing <= 1:
        raise LayerError(
            f"label_smoothing must be in [0, 1], but got label_smoothing={label_smoothing!r}. Use "
            "for instance 0.1."
        )
    if not z_loss >= 0:
        raise LayerError(
            f"z_loss must be at least 0, but got z_loss={z_loss!r}. Use for instance 1e-4."
        )
