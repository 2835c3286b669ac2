"""Cross entropy from whole logits, or from slices of them that are never put together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._numbers import as_integer
from jaxpipe.errors import LayerError, shown
from jaxpipe.topology import sum_over

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

    It can be a `loss_fn` as it is; the loss of a batch is then the mean over all positions that
    count, however they are spread over microbatches and replicas. A `loss_fn` that calls it lets
    `pipeline.split_vocabulary` split the model's head over the stages. The per-position loss is

        (1 - label_smoothing) * -log p[label] + label_smoothing * mean(-log p) + z_loss *
        log(sum(exp(logits)))**2

    Args:
        logits: `[..., vocab_size]`, whole or split over the stages. Computed with in float32, or
            wider.
        labels: Integers in `[0, vocab_size)`, or `ignore_index`, of the leading shape `[...]`.
            Others give NaN.
        weights: What each position counts, `[...]`, numbers or booleans; None: 1. Labels of weight
            0 may be anything.
        ignore_index: A label that marks positions which do not count.
        label_smoothing: Share of the target probability that is spread evenly over the vocabulary,
            in `[0, 1]`.
        z_loss: Factor of the squared log of the softmax's normaliser, which keeps logits from
            drifting; PaLM uses 1e-4.

    Returns:
        `(sum, weight)`, `float32[]` each: the weighted sum over the positions, and the sum of their
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
    labels = signed(jnp.asarray(labels))
    counted = labels != ignore_index
    if weights is not None:
        counted &= weights != 0
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    terms = _reduced(logits, jnp.where(is_class, labels, 0), needs_mean=label_smoothing > 0)
    losses = (
        terms.log_normaliser - (1 - label_smoothing) * terms.of_label - label_smoothing * terms.mean
    )
    losses += z_loss * terms.log_normaliser**2
    # Not 0: a label that is wrong by mistake must not pass for one that is ignored.
    losses = jnp.where(counted, jnp.where(is_class, losses, jnp.nan), 0.0)
    if weights is None:
        return losses.sum(), counted.sum(dtype=losses.dtype)
    factors = jnp.where(counted, weights, 0).astype(losses.dtype)
    return (losses * factors).sum(), factors.sum()


def vocab_cross_entropy(
    logits: Logits, labels: jax.Array, num_embeddings: int | None = None
) -> jax.Array:
    """Cross entropy of each position, for losses of one's own, from whole or split logits.

    With split logits, the largest logit, the sum of exponentials and the label's logit are reduced
    over the stages; the logits themselves never are. A `loss_fn` takes the mean, or returns a
    weighted sum and the sum of weights.

    Args:
        logits: `[..., num_embeddings]`, whole or split over the stages. Computed with in float32,
            or wider.
        labels: Integers in `[0, num_embeddings)`, of the leading shape; what lies outside must be
            masked by the caller.
        num_embeddings: Number of all logits, where an array may be this stage's slice of them, as
            in a `shard_map` of one's own; None: an array is whole.

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

    For losses that compare whole answers, such as those of preference tuning; in float32, or wider.
    `engine.log_probs` gives those of a model that is not trained.

    Args:
        logits: `[samples, ..., vocab_size]`, whole or split over the stages.
        labels: Integers in `[0, vocab_size)`, or `ignore_index`, of the leading shape. Others give
            NaN.
        segment_ids: Integers of the shape of the labels, where several answers are packed into a
            sample: the answer of each position, from 0; those of others, such as -1, do not count.
        num_segments: How many answers a sample has; with `segment_ids` only.
        ignore_index: A label that marks positions which do not count.

    Returns:
        `[samples]`, or with `segment_ids` `[samples, num_segments]`.

    Raises:
        LayerError: Labels or segments are not integers of the leading shape, or `num_segments` is
            not a positive integer where segments are given.

    Example:
        >>> import jax.numpy as jnp
        >>> found = log_probs(jnp.zeros((1, 3, 4)), jnp.array([[2, 0, -100]]))
        >>> bool(jnp.allclose(found, -2 * jnp.log(4.0)))
        True

    Reference:
        What Rafailov et al., Direct Preference Optimization (2023), section 4, compare.
    """
    _check(logits, labels, None, 0.0, 0.0)
    _check_segments(labels, segment_ids, num_segments)
    labels = signed(jnp.asarray(labels))
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    values = -vocab_cross_entropy(logits, jnp.where(is_class, labels, 0))
    values = jnp.where(labels != ignore_index, jnp.where(is_class, values, jnp.nan), 0.0)
    inner = tuple(range(1, labels.ndim))
    if segment_ids is None:
        return values.sum(inner)
    assert num_segments is not None  # checked above
    is_of = jax.nn.one_hot(segment_ids, num_segments, dtype=jnp.bool_)
    # Selected, not multiplied: what does not count may be NaN.
    return jnp.where(is_of, values[..., None], 0.0).sum(inner)


class _Reduced(NamedTuple):
    """What a loss needs of the logits of each position, `[...]`, the same on every stage.

    Attributes:
        log_normaliser: Log of the sum of exponentials.
        of_label: The label's logit; 0 where it is no class.
        mean: Mean of the logits; 0 where it is not needed.
    """

    log_normaliser: jax.Array
    of_label: jax.Array
    mean: jax.Array


def _reduced(logits: Logits, labels: jax.Array, *, needs_mean: bool) -> _Reduced:
    local = logits.local if isinstance(logits, SplitLogits) else logits
    local, vocab_size = local.astype(np.promote_types(local.dtype, np.float32)), logits.shape[-1]
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
            "of none."
        )


def _check(logits: Any, labels: Any, weights: Any, label_smoothing: Any, z_loss: Any) -> None:
    if not isinstance(logits, SplitLogits | jax.Array | np.ndarray) or not logits.ndim:
        raise LayerError(
            f"logits must be an array [..., vocab_size], but got {shown(logits)}. Pass the model's "
            "output, or the entry of it that holds the logits."
        )
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        found = getattr(labels, "dtype", type(labels).__name__)
        raise LayerError(
            f"labels must be integers, the number of a class for each position, but got {found}. "
            "Pass jnp.argmax of one-hot labels, or optax.softmax_cross_entropy where labels are "
            "probabilities."
        )
    shape = logits.shape[:-1]
    if labels.shape != shape:
        raise LayerError(
            f"labels must have the shape of the logits without their last dim, {list(shape)}, but "
            f"got {list(labels.shape)}. Shift labels in the data, or index both alike: logits[:, "
            ":-1] and labels[:, 1:]."
        )
    if weights is not None and getattr(weights, "shape", None) != shape:
        found = list(getattr(weights, "shape", ())) if hasattr(weights, "shape") else shown(weights)
        raise LayerError(
            f"weights must be an array of the shape of the labels, {list(shape)}, but got {found}. "
            "Broadcast them with jnp.broadcast_to."
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
