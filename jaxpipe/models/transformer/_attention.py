"""`attention`: softmax attention with cuDNN's or a TPU's kernels if possible, otherwise blocked."""

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpipe._util.numbers import as_integer
from jaxpipe._util.typing import PyTree
from jaxpipe.distributed import log
from jaxpipe.distributed.topology import SEQUENCE
from jaxpipe.errors import LayerError
from jaxpipe.layers.recompute import is_first, traced_mesh

from ._blocked import Operands, Pattern, Visibility, blocked_attention, filled
from ._ring import ring_attention
from ._sequence import Division, OverSequence, division
from ._sharding import traced_platform
from ._splash import splash_attention, splash_refusal

Implementation = Literal["auto", "blocked", "cudnn", "splash", "xla"]
"""How attention is computed."""

_MASKS_SINCE = (0, 11, 1)
"""The first version of JAX whose cuDNN kernel computes no gradient of a boolean mask.

That gradient is as large as the scores.
"""

_SUBJECTS: dict[str, str] = {
    "cudnn": "cuDNN's attention",
    "splash": "a TPU's attention",
    "xla": 'implementation="xla"',
}
"""The subjects of refusals."""

Segments = jax.Array | tuple[jax.Array, jax.Array] | None


def attention(  # noqa: PLR0913  # what may hide a key, one argument each
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    mask: jax.Array | None = None,
    lengths: jax.Array | None = None,
    segment_ids: Segments = None,
    window: int | None = None,
    dropout_rate: float = 0.0,
    key: jax.Array | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: Implementation = "auto",
    sequence: OverSequence = "auto",
) -> jax.Array:
    """Compute softmax attention without storing anything of shape `[T, S]`.

    For each head, the result is `softmax(scale * q @ k.T) @ v`.

    A query sees the keys that `causal`, `mask`, `lengths`, `segment_ids` and `window` all allow. A
    query that sees no key gets zero (with `implementation="xla"`, the mean of `v`). The residuals
    are q, k, v, the output and one number per row. In layers with recompute,
    `checkpointing.keep_kernels` keeps the output and these numbers.

    Args:
        q: Queries `[B, T, N, D]`.
        k: Keys `[B, S, K, D]`. `K` must divide `N`: each key head serves `N / K` neighbouring query
            heads.
        v: Values `[B, S, K, Dv]`. `Dv` may differ from `D`.
        causal: Whether query i sees only keys up to i.
        mask: `[B or 1, N or 1, T or 1, S or 1]`. Either booleans, true where a query sees a key, or
            numbers that are added to the scaled scores. The mask gets no gradient.
        lengths: Integers `[B]`, the number of keys of each sample. Later keys are hidden.
        segment_ids: Integers `[B, T]`, or a pair of arrays for queries and keys. A query sees only
            keys of its own segment.
        window: Query i sees only keys less than this many positions away, including its own.
        dropout_rate: Fraction of the probabilities that are set to zero. The others are divided by
            `1 - dropout_rate`.
        key: Key for dropout. The same key drops the same probabilities, also when the backward
            recomputes them.
        scale: Factor of the scores. None means `D ** -0.5`.
        sinks: Floats `[N]`, one more score for each query head, which no key has and which nothing
            hides. It adds to the sum of the softmax, but not to the result, so that a query can
            attend to nothing. Sinks get their gradient.
        soft_cap: Scaled scores `s` become `soft_cap * tanh(s / soft_cap)` before masks apply. None
            means no cap.
        implementation: How attention is computed.

            `"auto"` uses a kernel if the devices and arguments allow it, and `"blocked"` otherwise.
            The devices are those of the pipeline's mesh; outside a pipeline they are JAX's default
            devices. The logger `jaxpipe` reports the choice and the reason.

            cuDNN's kernel needs NVIDIA GPUs with cuDNN, a 16-bit dtype, a supported head size, no
            dropout, no `sinks`, no `soft_cap`, no `mask` of numbers, and no `window` without
            `causal`. Before JAX 0.11.1 it also needs no `mask` and no `segment_ids` at all. A mask
            or segments are passed to the kernel as one number per query and key, in the dtype of
            `q`, which the backward makes again. If `Dv` differs from `D`, the smaller heads are
            padded with zeros, which does not change the result.

            JAX's splash attention needs TPUs, bfloat16 or float32, numbers of positions that are
            multiples of 128, at most as many queries as keys, and no dropout. It supports `causal`,
            `window`, `sinks`, `soft_cap`, any `Dv`, and `segment_ids` that are the same for queries
            and keys.

            `"blocked"` computes in blocks of queries and keys, in plain JAX, for any backend, dtype
            and arguments. `"cudnn"` and `"splash"` use that kernel or raise an error. `"xla"` is
            JAX's own implementation, which computes all scores at the same time and supports no
            dropout, no `sinks` and no `soft_cap`.
        sequence: How attention is computed in a pipeline whose mesh has an axis `sequence`, along
            which positions are divided. It has no effect elsewhere.

            With `"ulysses"` each device computes some heads for all positions, with any
            `implementation`; the axis (times `model`, if it divides the heads) must divide the
            heads of the keys. With `"ring"` each device keeps its positions, and keys and values
            travel around the axis. A ring computes in blocks of plain JAX. It takes no `mask` and
            no dropout, and as many queries as keys. P devices must divide the positions; with
            `causal` or `window`, P squared must.

            `"auto"` is `"ulysses"` if possible, otherwise `"ring"` if possible. Otherwise every
            device of the axis computes all of attention. The logger `jaxpipe` reports the choice.

    Returns:
        `[B, T, N, Dv]`, in the dtype of `q`.

    Raises:
        LayerError: Shapes, dtypes or arguments do not fit together, or the requested implementation
            does not support them.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe
        >>> q = jax.random.normal(jax.random.key(0), (2, 5, 4, 8))
        >>> jaxpipe.attention(q, q[:, :, :2], q[:, :, :2], causal=True).shape
        (2, 5, 4, 8)

    Reference:
        Dao, "FlashAttention-2" (2023). Sinks: Xiao et al., "Efficient Streaming Language Models
        with Attention Sinks" (2023), and OpenAI's gpt-oss. Soft caps: Gemma 2 (2024).
    """
    _check_arrays(q, k, v)
    _check_options(implementation, dropout_rate, key, window, soft_cap)
    if sinks is not None:
        sinks = _checked_sinks(sinks, q.shape[2])
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    pattern = Pattern(causal, as_integer(window), factor, dropout_rate, soft_cap)
    visibility = _visibility(q, k, mask, lengths, segment_ids)
    visibility = visibility._replace(key=key if dropout_rate else None)
    divided = division(sequence, pattern, q, k, visibility)
    given = Operands(q, k, v, sinks, visibility)
    if divided.way == "ring":
        if implementation not in ("auto", "blocked"):
            raise LayerError(
                f"a ring over the mesh axis {SEQUENCE!r} must be computed in blocks, but got "
                f"implementation={implementation!r}. Leave implementation out."
            )
        _report(given, f"blocked in a ring over {SEQUENCE!r}, because {divided.why}")
        return ring_attention(pattern, given)
    # For the absent devices of a plan no kernel can be compiled, also if it was asked for.
    if implementation == "auto" or (implementation == "splash" and _is_absent()):
        implementation = _chosen(divided, pattern, given)
    elif refusal := _refusal(implementation, divided, pattern, given):
        raise LayerError(
            f"{_SUBJECTS[implementation]} must be able to compute this, but got: {refusal}. "
            'Leave implementation out, or say implementation="blocked".'
        )
    q, k, v = divided.by_heads(q, k, v)
    given = Operands(q, k, v, sinks, visibility)
    if implementation == "blocked":
        out: Any = blocked_attention(pattern, given)
    elif implementation == "cudnn":
        out = _cudnn(divided, pattern, given)
    elif implementation == "splash":
        out = _splash(divided, pattern, given)
    else:
        out = _xla(pattern, given)
    return divided.by_positions(out)


def _chosen(
    divided: Division,
    pattern: Pattern,
    given: Operands,
) -> Implementation:
    kernel: Implementation = "splash" if traced_platform() == "tpu" else "cudnn"
    if _is_absent():
        refusal = "the devices do not exist, and a plan counts it as one kernel"
    else:
        refusal = _unless("TPUs" if kernel == "splash" else "NVIDIA GPUs") or _refusal(
            kernel, divided, pattern, given
        )
    chosen, why = (
        ("blocked", refusal) if refusal else (kernel, "the devices, dtype and head size allow it")
    )
    named = {
        "ulysses": f"{chosen} by heads over {SEQUENCE!r}, because {divided.why}, and",
        "whole": f"{chosen} on each device of {SEQUENCE!r}, because {divided.why}, and",
    }.get(divided.way or "", f"{chosen}, because")
    _report(given, f"{named} {why}")
    return chosen


def _report(given: Operands, chosen: str) -> None:
    q, k, v = given[:3]
    shape = f"q {q.dtype}{list(q.shape)}, k {list(k.shape)}"
    if k.shape != v.shape:
        shape += f", v {list(v.shape)}"
    if is_first(f"attention {shape} {chosen}"):
        log(logging.INFO, "attention of %s: %s", shape, chosen)


def _refusal(
    implementation: Implementation,
    divided: Division,
    pattern: Pattern,
    given: Operands,
) -> str | None:
    """Return why an implementation cannot compute this; None if it can."""
    if implementation == "cudnn":
        return _cudnn_refusal(divided, pattern, given)
    if implementation == "splash":
        return _unless("TPUs") or splash_refusal(pattern, given.q, given.k, given.visibility)
    return _xla_refusal(pattern, given.sinks) if implementation == "xla" else None


def _is_absent() -> bool:
    """Whether the devices belong to a plan, for which nothing is compiled."""
    mesh = traced_mesh()
    return mesh is not None and getattr(mesh.devices.flat[0], "is_absent", False)


def _unless(devices: Literal["NVIDIA GPUs", "TPUs"]) -> str | None:
    """Return a refusal unless the devices are of this kind."""
    names = ("tpu",) if devices == "TPUs" else ("gpu", "cuda")
    if traced_platform() in names:
        return None
    return f"the devices are of platform {traced_platform()!r}, not {devices}"


def _cudnn_refusal(
    divided: Division,
    pattern: Pattern,
    given: Operands,
) -> str | None:
    """Return why cuDNN's kernels cannot compute this; None if they can."""
    q, _, _, sinks, visibility = given
    hides_pairs = visibility.mask is not None or visibility.query_segments is not None
    since = ".".join(map(str, _MASKS_SINCE))
    found = {
        f"the dtype is {q.dtype}, and its kernels take float16 and bfloat16": q.dtype
        not in (jnp.float16, jnp.bfloat16),
        "probabilities are dropped, which it can do only with a constant seed": pattern.dropout_rate
        > 0,
        "there is a mask of numbers, whose gradient it would compute": not _is_boolean(
            visibility.mask
        ),
        f"there is a mask or segment_ids, whose gradient it would compute before JAX {since}": (
            hides_pairs and jax.__version_info__ < _MASKS_SINCE
        ),
        # JAX returns the logarithms of the sums, with which outputs could be corrected, in 16 bits.
        "there are sinks, and its kernels have none": sinks is not None,
        "there is a soft_cap, and its kernels have none": pattern.soft_cap is not None,
        "a window looks at later keys, too": pattern.window is not None and not pattern.causal,
    }
    refusals = [why for why, holds in found.items() if holds]
    if refusals:
        return refusals[0]

    def train(given: Operands) -> jax.Array:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return _cudnn(divided, pattern, given._replace(q=q, k=k, v=v))

        return jax.vjp(call, *given[:3])[0]

    # JAX checks the rest while tracing: head sizes by version and device, and whether cuDNN exists.
    try:
        jax.eval_shape(train, given)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0].rstrip(".")
    return None


def _cudnn(
    divided: Division,
    pattern: Pattern,
    given: Operands,
) -> jax.Array:
    q, k, _, _, visibility = given
    mask = _boolean_mask(visibility)
    if mask is not None:
        # `_sees_any` reads all queries and keys off the mask. Samples and heads may stay 1.
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], k.shape[1]))
    hides = Visibility(mask, visibility.lengths)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, hides: Visibility) -> jax.Array:
        attend = _jax_attention(pattern, "cudnn")
        out = attend(q, k, v, mask=hides.mask, key_value_seq_lengths=hides.lengths)
        if hides.mask is None:
            return out
        # The kernel replaces hidden scores by large negative numbers. If all scores of a row are
        # hidden, it returns the mean of `v`.
        return jnp.where(_sees_any(pattern, hides.mask, hides.lengths), out, 0)

    def spec_of(x: jax.Array, samples: Any, heads: Any) -> P:
        """Return the sharding of the mask, whose dims may be 1, or of the lengths."""
        sizes = zip((samples, heads), x.shape, strict=False)
        return P(*(axis if size > 1 else None for axis, size in sizes))

    return _by_heads(divided, call, given, hides, spec_of)


def _splash(
    divided: Division,
    pattern: Pattern,
    given: Operands,
) -> jax.Array:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, others: Any) -> jax.Array:
        return splash_attention(pattern, q, k, v, *others)

    def spec_of(x: jax.Array, samples: Any, heads: Any) -> P:
        """Return the sharding of the sinks `[N]` or of the segments `[B, T]`."""
        return P(heads if x.ndim == 1 else samples)

    return _by_heads(divided, call, given, (given.sinks, given.visibility.query_segments), spec_of)


def _by_heads(
    divided: Division,
    call: Callable[..., jax.Array],
    given: Operands,
    hides: PyTree,
    spec_of: Callable[[jax.Array, Any, Any], P],
) -> jax.Array:
    """Call a kernel on each device, for its own samples and heads; `spec_of` shards `hides`."""
    # JAX (0.10) cannot partition a kernel if other axes are manual.
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.auto_axes) if mesh.manual_axes else set[str]()
    if not axes:
        return call(*given[:3], hides)
    samples = divided.samples
    heads = divided.heads
    each = P(samples, None, heads)
    specs = (each, each, each, jax.tree.map(lambda x: spec_of(x, samples, heads), hides))
    return jax.shard_map(call, in_specs=specs, out_specs=each, axis_names=axes, check_vma=False)(
        *given[:3], hides
    )


def _is_boolean(mask: jax.Array | None) -> bool:
    return mask is None or mask.dtype == jnp.bool_


def _boolean_mask(visibility: Visibility) -> jax.Array | None:
    """Combine a boolean mask and segments into one mask of the form of `Visibility.mask`."""
    mask = visibility.mask if _is_boolean(visibility.mask) else None
    if visibility.query_segments is None or visibility.key_segments is None:
        return mask
    same = visibility.query_segments[:, None, :, None] == visibility.key_segments[:, None, None, :]
    return same if mask is None else mask & same


def _sees_any(pattern: Pattern, mask: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Whether queries see any key, `[B or 1, T, N or 1, 1]`; the mask has `[..., T, S]`."""
    queries = jnp.arange(mask.shape[2])[:, None]
    keys = jnp.arange(mask.shape[3])[None]
    seen = jnp.ones((mask.shape[2], mask.shape[3]), bool)
    if pattern.causal:
        seen &= keys <= queries
    if pattern.window is not None:
        seen &= queries - keys < pattern.window
    mask &= seen[None, None]
    if lengths is not None:
        mask &= keys[None, None] < lengths[:, None, None, None]
    return mask.any(-1).swapaxes(1, 2)[..., None]


def _xla_refusal(pattern: Pattern, sinks: jax.Array | None) -> str | None:
    """Return why JAX's own implementation cannot compute this; None if it can."""
    found = {
        f"probabilities are dropped (dropout_rate={pattern.dropout_rate})": pattern.dropout_rate
        > 0,
        "there are sinks": sinks is not None,
        f"there is a cap (soft_cap={pattern.soft_cap})": pattern.soft_cap is not None,
    }
    return next((why for why, holds in found.items() if holds), None)


def _xla(pattern: Pattern, given: Operands) -> jax.Array:
    q, k, v, _, visibility = given
    bias = None if _is_boolean(visibility.mask) else visibility.mask
    mask = _boolean_mask(visibility)
    if bias is not None:
        # As wide as the scores: in the dtype of `q`, float32's lowest number would be infinite.
        bias = jax.lax.stop_gradient(bias.astype(np.promote_types(q.dtype, np.float32)))
    call = _jax_attention(pattern, "xla")
    return call(q, k, v, bias, mask, key_value_seq_lengths=visibility.lengths)


def _jax_attention(
    pattern: Pattern, implementation: Literal["cudnn", "xla"]
) -> Callable[..., jax.Array]:
    # JAX counts the keys on each side of a query, without the one at its own position.
    sides = (
        None
        if pattern.window is None
        else (pattern.window - 1, 0 if pattern.causal else pattern.window - 1)
    )

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *args: Any, **given: Any) -> jax.Array:
        # JAX's function takes heads of one size only. Zeros change neither scores nor sums.
        size = max(k.shape[-1], v.shape[-1])
        out = jax.nn.dot_product_attention(
            *(filled(x, x.ndim - 1, size) for x in (q, k, v)),
            *args,
            scale=pattern.scale,
            is_causal=pattern.causal,
            local_window_size=sides,
            implementation=implementation,
            **given,
        )
        return out[..., : v.shape[-1]]

    return call


def _check_options(
    implementation: str,
    dropout_rate: float,
    key: jax.Array | None,
    window: int | None,
    soft_cap: float | None,
) -> None:
    if implementation not in get_args(Implementation):
        raise LayerError(
            f"implementation must be one of {', '.join(get_args(Implementation))}, but got "
            f"{implementation!r}. "
            'Leave it out for "auto".'
        )
    if not 0.0 <= dropout_rate < 1.0 or (dropout_rate and key is None):
        raise LayerError(
            "attention's dropout_rate must be in [0, 1) and passed with a key, but got "
            f"dropout_rate={dropout_rate} and key={key}. Pass key=self.make_rng('dropout'), or "
            "dropout_rate=0.0 outside of training."
        )
    if window is not None and as_integer(window, 1) is None:
        raise LayerError(
            f"window must be an integer >= 1 or None, but got window={window!r}. It counts "
            "positions."
        )
    if soft_cap is not None and not soft_cap > 0:
        raise LayerError(
            f"soft_cap must be a number > 0 or None, but got soft_cap={soft_cap!r}. Leave it out "
            "for scores without a cap."
        )


def _check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = [tuple(jnp.shape(x)) for x in (q, k, v)]
    if any(len(shape) != 4 for shape in shapes) or shapes[1][:3] != shapes[2][:3]:
        raise _misfit("q must be [B, T, N, D], k [B, S, K, D] and v [B, S, K, Dv]", q, k, v)
    if (shapes[0][0], shapes[0][3]) != (shapes[1][0], shapes[1][3]) or shapes[0][2] % max(
        shapes[1][2], 1
    ):
        raise _misfit(
            "q and k must have equal B and D, and heads of keys that divide those of queries",
            q,
            k,
            v,
        )
    if len({x.dtype for x in (q, k, v)}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise _misfit("q, k and v must have one floating-point dtype", q, k, v)


def _checked_sinks(sinks: jax.Array, heads: int) -> jax.Array:
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise LayerError(
            f"sinks must hold one float for each query head, of shape [{heads}], but got "
            f"{sinks.dtype}{list(sinks.shape)}. Pass a parameter of shape [N]."
        )
    return sinks


def _visibility(
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array | None,
    lengths: jax.Array | None,
    segment_ids: Segments,
) -> Visibility:
    batch = q.shape[0]
    num_queries = q.shape[1]
    heads = q.shape[2]
    num_keys = k.shape[1]
    full = (batch, heads, num_queries, num_keys)
    if mask is not None:
        mask = jnp.asarray(mask)
        fits = mask.ndim == 4 and all(
            size in (1, of) for size, of in zip(mask.shape, full, strict=True)
        )
        if not fits or not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)):
            raise LayerError(
                "mask must hold booleans or floats of shape [B or 1, N or 1, T or 1, S or 1] with "
                f"[B, N, T, S]={list(full)}, but got {mask.dtype}{list(mask.shape)}. Use size "
                "1 for dims that it does not have."
            )
    lengths = None if lengths is None else _integers("lengths", lengths, batch)
    if segment_ids is None:
        return Visibility(mask, lengths)
    of_queries, of_keys = (
        segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    )
    of_queries = _integers("segment_ids of queries", of_queries, batch, num_queries)
    # Use the same array for both if they are equal: a kernel may need to know.
    is_one = of_keys is segment_ids and num_queries == num_keys
    keys = "segment_ids of keys", of_keys, batch, num_keys
    return Visibility(mask, lengths, of_queries, of_queries if is_one else _integers(*keys))


def _integers(name: str, value: jax.Array, *shape: int) -> jax.Array:
    value = jnp.asarray(value)
    if value.shape != shape or not jnp.issubdtype(value.dtype, jnp.integer):
        raise LayerError(
            f"{name} must hold integers of shape {list(shape)}, but got "
            f"{value.dtype}{list(value.shape)}. Pass one per sample for lengths, one per position "
            "for segment_ids."
        )
    return value.astype(jnp.int32)


def _misfit(rule: str, q: jax.Array, k: jax.Array, v: jax.Array) -> LayerError:
    given = ", ".join(
        f"{name} {x.dtype}{list(jnp.shape(x))}" for name, x in (("q", q), ("k", k), ("v", v))
    )
    return LayerError(
        f"{rule}, but got {given}. Positions come before heads: reshape [B, T, N * D] to [B, T, N, "
        "D]."
    )
