"""Attention in blocks against all scores at once.

Values, gradients, what is kept, and what is refused.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import check_refused
from _tolerances import assert_close

from jaxpipe import attention
from jaxpipe.checkpointing import keep_kernels
from jaxpipe.errors import LayerError
from jaxpipe.models.transformer import _attention

B, T, N, K, D = 2, 300, 4, 2, 8  # more than a block, and no whole number of them


def reference(  # noqa: PLR0913  # what attention takes
    q: Any,
    k: Any,
    v: Any,
    hidden: Any,
    bias: Any = 0.0,
    keep: Any = 1.0,
    sinks: Any = None,
    soft_cap: float | None = None,
) -> Any:
    """All scores at once; `hidden` and what else there is are `[B, N, T, S]`."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[3])
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(hidden, -1e30, scores + bias)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], -1)
    weights = jax.nn.softmax(scores)[..., : k.shape[1]]
    weights = jnp.where(hidden.all(-1, keepdims=True), 0.0, weights) * keep
    return jnp.einsum("bnts,bsnd->btnd", weights, v)


def inputs(seed: int = 0, num_keys: int = T) -> tuple[Any, Any, Any, Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (B, T, N, D), (B, num_keys, K, D), (B, num_keys, K, D), (B, T, N, D)
    q, k, v, grad = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return q, k, v, grad


def values_and_gradients(function: Any, q: Any, k: Any, v: Any, grad: Any) -> Any:
    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        out, pullback = jax.vjp(function, q, k, v)
        return out, pullback(grad)

    return jax.device_get(run(q, k, v))


def hidden_by(num_keys: int = T, **given: Any) -> Any:
    rows, cols = jnp.arange(T)[:, None], jnp.arange(num_keys)[None]
    hidden = jnp.zeros((B, N, T, num_keys), bool)
    if given.get("causal"):
        hidden |= (cols > rows)[None, None]
    if "window" in given:
        hidden |= (jnp.abs(rows - cols) >= given["window"])[None, None]
    if "lengths" in given:
        hidden |= cols[None, None] >= given["lengths"][:, None, None, None]
    if "segment_ids" in given:
        ids = given["segment_ids"]
        hidden |= (ids[:, :, None] != ids[:, None, :])[:, None]
    if given.get("mask") is not None and given["mask"].dtype == jnp.bool_:
        hidden |= ~given["mask"]
    return hidden


RNG = np.random.default_rng(0)
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": 20},
    "causal_window_segments": {
        "causal": True,
        "window": 280,
        "segment_ids": jnp.arange(B * T).reshape(B, T) // 130,
    },
    "lengths": {"lengths": jnp.array([0, 270])},
    "of_keys": {"mask": jnp.asarray(RNG.random((B, 1, 1, T)) < 0.8)},
    "of_pairs": {"mask": jnp.asarray(RNG.random((1, N, T, T)) < 0.8), "causal": True},
    "added": {"mask": jnp.asarray(RNG.normal(size=(B, 1, 1, T)), jnp.float32)},
}


@pytest.mark.parametrize(
    "name",
    sweep(
        3, sorted(CASES, key=lambda x: x not in ("causal_window_segments", "lengths", "of_pairs"))
    ),
)
def test_blocks_give_what_all_scores_at_once_give(name: str) -> None:
    q, k, v, grad = inputs()
    given = CASES[name]
    bias = given["mask"] if name == "added" else 0.0
    found = values_and_gradients(functools.partial(attention, **given), q, k, v, grad)
    wanted = values_and_gradients(lambda *x: reference(*x, hidden_by(**given), bias), q, k, v, grad)
    assert_close(found, wanted)


EXTRAS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal_window_segments": {},
    "lengths": {},
    "of_pairs": {},
    "dropped": {"causal": True, "dropout_rate": 0.3, "key": jax.random.key(3)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, list(EXTRAS)[::-1]))
def test_sinks_caps_and_wider_or_narrower_values(name: str) -> None:
    """Against all scores at once, with one more score for each head, in the steep part of caps."""
    q, k, v, grad = inputs()
    q, sinks = 4 * q, jnp.linspace(-3.0, 5.0, N)
    v, grad = (jnp.concatenate([x, x[..., : D // 2]], -1) for x in (v, grad))
    given = {**CASES.get(name, {}), **EXTRAS[name]}
    keep = kept_pairs(**given) if name == "dropped" else 1.0

    def run(function: Any) -> Any:
        out, pullback = jax.vjp(function, q, k, v, sinks)
        return out, pullback(grad)

    found, wanted = (
        jax.device_get(jax.jit(run, static_argnums=0)(function))
        for function in (
            lambda *x: attention(*x[:3], sinks=x[3], soft_cap=2.0, **given),
            lambda *x: reference(*x[:3], hidden_by(**given), keep=keep, sinks=x[3], soft_cap=2.0),
        )
    )
    assert_close(found, wanted)


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    q, k, v, _ = inputs()
    lowest = jnp.full((N,), -jnp.inf)
    given = CASES["lengths"]
    assert_close(attention(q, k, v, sinks=lowest, **given), attention(q, k, v, **given))


@pytest.mark.parametrize("size", sweep(1, [D // 2, 2 * D]))
@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
def test_kernels_for_one_size_get_padded_heads(
    implementation: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JAX's own attention in the place of cuDNN's, which takes the same arguments."""
    q, k, _, _ = inputs()
    v, grad = (jax.random.normal(jax.random.key(9), (B, T, n, size)) for n in (K, N))
    true = _attention._jax_attention
    monkeypatch.setattr(_attention, "_jax_attention", lambda pattern, _: true(pattern, "xla"))
    monkeypatch.setattr(_attention, "_cudnn_refusal", lambda *_: None)
    found, wanted = (
        values_and_gradients(
            functools.partial(attention, causal=True, implementation=name), q, k, v, grad
        )
        for name in (implementation, "blocked")
    )
    assert_close(found, wanted)


def test_keys_may_be_more_than_queries() -> None:
    q, k, v, grad = inputs(num_keys=2 * T)
    found = values_and_gradients(attention, q, k, v, grad)
    assert_close(
        found, values_and_gradients(lambda *x: reference(*x, hidden_by(2 * T)), q, k, v, grad)
    )


def test_jax_own_gives_the_same() -> None:
    q, k, v, grad = inputs()
    given: dict[str, Any] = {**CASES["causal_window_segments"], "mask": CASES["added"]["mask"]}
    found, wanted = (
        values_and_gradients(
            functools.partial(attention, implementation=name, **given), q, k, v, grad
        )
        for name in ("blocked", "xla")
    )
    assert_close(found, wanted)


HIDING: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("causal_window_segments", "of_keys", "of_pairs")},
    "lengths": {"lengths": jnp.array([40, 270]), "mask": CASES["of_keys"]["mask"]},
    "nothing_seen": {
        "mask": jnp.asarray(RNG.random((B, N, T, T)) < 0.5)
        .at[:, :, :7, 7:]
        .set(True)
        .at[:, :, :7, :7]
        .set(False)
    },
}


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HIDING)
def test_what_the_kernel_is_given_hides_the_same(
    name: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JAX's own attention in the place of cuDNN's, which takes the same arguments."""
    q, k, v, grad = inputs()
    given: dict[str, Any] = {**HIDING[name], "causal": causal or "window" in HIDING[name]}
    true = _attention._jax_attention
    monkeypatch.setattr(_attention, "_jax_attention", lambda pattern, _: true(pattern, "xla"))
    monkeypatch.setattr(_attention, "_cudnn_refusal", lambda *_: None)
    found = values_and_gradients(
        functools.partial(attention, implementation="cudnn", **given), q, k, v, grad
    )
    assert_close(
        found, values_and_gradients(lambda *x: reference(*x, hidden_by(**given)), q, k, v, grad)
    )


@pytest.mark.parametrize("name", ["of_keys", "causal_window_segments"])
def test_the_kernel_is_for_masks_whose_gradient_it_does_not_compute(name: str) -> None:
    """On a machine without a GPU the reason is the next one."""
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs())
    is_new = jax.__version_info__ >= (0, 11, 1)
    reason = (
        "but got: (?!there is)"
        if is_new
        else "mask or segment_ids, whose gradient it would compute before JAX 0.11.1"
    )
    with pytest.raises(LayerError, match=reason):
        attention(q, k, v, implementation="cudnn", **CASES[name])


def kept_pairs(dropout_rate: float, **given: Any) -> Any:
    """What probabilities are multiplied by, seen through values that are rows of the identity."""
    q, k, _, _ = inputs()
    eye = jnp.broadcast_to(jnp.eye(T).reshape(1, T, 1, T), (B, T, K, T))
    out = attention(q, k, eye, dropout_rate=dropout_rate, **given)
    return jnp.swapaxes(out != 0, 1, 2) / (1 - dropout_rate)


@pytest.mark.slow
def test_dropout_is_the_same_in_the_backward() -> None:
    rate, key = 0.3, jax.random.key(3)
    q, k, v, grad = inputs()
    drop = functools.partial(attention, causal=True, dropout_rate=rate, key=key)
    hidden = hidden_by(causal=True)
    keep = kept_pairs(rate, causal=True, key=key)
    share = float(jnp.mean(keep > 0, where=~hidden))
    assert share == pytest.approx(1 - rate, abs=0.01)
    assert_close(
        values_and_gradients(drop, q, k, v, grad),
        values_and_gradients(lambda *x: reference(*x, hidden, keep=keep), q, k, v, grad),
    )


def test_sixteen_bits_are_summed_in_more() -> None:
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs())
    found = attention(q, k, v, causal=True)
    assert found.dtype == jnp.bfloat16
    wanted = reference(*(x.astype(jnp.float32) for x in (q, k, v)), hidden_by(causal=True))
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=0.02)


@pytest.mark.parametrize("dtype", sweep(1, [jnp.bfloat16, jnp.float16]))
@pytest.mark.parametrize("implementation", ["blocked", "xla"])
def test_a_row_hidden_by_the_lowest_float_is_finite(implementation: Any, dtype: Any) -> None:
    q, k, v, _ = (x.astype(dtype) for x in inputs())
    mask = jnp.zeros((B, 1, 1, T)).at[1].set(jnp.finfo(jnp.float32).min)
    found = attention(q, k, v, mask=mask, implementation=implementation)
    assert found.dtype == dtype
    assert np.isfinite(np.asarray(found, np.float32)).all()


def kept(function: Any, *args: Any) -> list[tuple[int, ...]]:
    """Shapes of what a function keeps for its backward, its arguments excepted."""
    pullback = jax.eval_shape(lambda *x: jax.vjp(function, *x)[1], *args)
    shapes = [leaf.shape for leaf in jax.tree.leaves(pullback)]
    for argument in args:
        if argument.shape in shapes:
            shapes.remove(argument.shape)
    return sorted(shapes)


def scans(function: Any, *args: Any) -> int:
    return str(jax.make_jaxpr(jax.grad(lambda *x: function(*x).sum()))(*args)).count(" scan[")


def test_a_policy_keeps_the_kernel_and_runs_it_once() -> None:
    x = jnp.ones((B, 512, D))

    def layer(x: jax.Array) -> jax.Array:
        q = jnp.sin(x).reshape(B, 512, 1, D)
        return jnp.cos(attention(q, 2 * q, 3 * q)).reshape(x.shape)

    named = jax.checkpoint(layer, policy=keep_kernels)
    assert kept(named, x) == [(B, 1, 1, 512), (B, 512, 1, D)]
    assert scans(named, x) == 2
    assert scans(jax.checkpoint(layer), x) == 3


def test_no_array_holds_all_scores() -> None:
    q = jax.ShapeDtypeStruct((1, 1024, 2, D), jnp.float32)
    text = jax.jit(jax.grad(lambda q: attention(q, q, q, causal=True).sum())).lower(q).as_text()
    assert "1024x1024" not in text
    assert "256x256" in text


def test_the_log_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v, _ = inputs()
    with caplog.at_level(logging.INFO, "jaxpipe"):
        attention(q, k, v)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "blocked, because the devices are of platform 'cpu', not NVIDIA GPUs"
    )


HALF = {name: jnp.ones((B, T, K, D), jnp.bfloat16) for name in "qkv"}
DROPPED = {"dropout_rate": 0.1, "key": jax.random.key(0)}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q": jnp.ones((B, T, N * D))}, r"q must be \[B, T, N, D\].*q float32\[2, 300, 32\]"),
    (dict.fromkeys("kv", jnp.ones((B, T, 3, D))), "divide those of queries.*3, 8"),
    ({"v": jnp.ones((B, T + 1, K, D))}, r"but got .*v float32\[2, 301, 2, 8\]"),
    ({"sinks": jnp.ones((K,))}, r"sinks must hold .* shape \[4\], but got float32\[2\]"),
    ({"sinks": jnp.ones((N,), int)}, r"one float for each query head.* got int32\[4\]"),
    ({"soft_cap": 0.0}, "soft_cap must be a number > 0 or None, but got soft_cap=0.0"),
    ({"q": jnp.ones((B, T, N, D), jnp.bfloat16)}, "one floating-point .* but got q bfloat16"),
    ({"mask": jnp.ones((B, T), bool)}, r"mask .*\[2, 4, 300, 300\], but got bool\[2, 300\]"),
    ({"mask": jnp.ones((B, 1, 1, T), int)}, "booleans or floats .* but got int"),
    ({"lengths": jnp.ones((B, 1), int)}, r"lengths .* integers of .*\[2\], but got int32\[2, 1\]"),
    ({"segment_ids": jnp.ones((B, T))}, r"segment_ids of queries .* shape \[2, 300\], but"),
    ({"dropout_rate": 0.1}, "dropout_rate=0.1 and key=None. Pass key="),
    ({**DROPPED, "dropout_rate": 1.0}, r"in \[0, 1\).*dropout_rate=1.0"),
    ({"window": 0}, "window must be an integer >= 1 or None, but got window=0"),
    ({"implementation": "flash"}, "of auto, blocked, cudnn, splash, xla, but got 'flash'"),
    ({"implementation": "cudnn"}, "is float32, and its kernels take float16 and bfloat16"),
    ({**DROPPED, "implementation": "xla"}, "are dropped .dropout_rate=0.1.*blocked"),
    ({"implementation": "xla", "sinks": jnp.ones((N,))}, "but got: there are sinks. Leave"),
    ({"implementation": "xla", "soft_cap": 5.0}, "but got: there is a cap .soft_cap=5.0"),
    (
        {**HALF, "implementation": "cudnn", "sinks": jnp.ones((K,))},
        "there are sinks, and its kernels have none. Leave",
    ),
    (
        {**HALF, "implementation": "cudnn", "soft_cap": 5.0},
        "there is a soft_cap, and its kernels have none. Leave",
    ),
]


def test_what_does_not_fit_is_refused() -> None:
    given = dict(zip("qkv", inputs(), strict=False))
    table = [(words, functools.partial(attention, **{**given, **x})) for x, words in REFUSED]
    check_refused(LayerError, table)
