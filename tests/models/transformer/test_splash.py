"""Attention by a TPU's kernels, interpreted, beside that in blocks; and when it is taken."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _covering import sweep
from _tolerances import assert_close

import jaxpipe
from jaxpipe.errors import LayerError
from jaxpipe.models.transformer import _attention
from jaxpipe.models.transformer._blocked import Operands, Pattern, Visibility, blocked_attention
from jaxpipe.models.transformer._splash import splash_attention, splash_refusal

HEADS = {"equal": (2, 2), "grouped": (4, 2)}


def arrays(queries: int, keys: int, heads: tuple[int, int], width: int = 64) -> tuple[Any, ...]:
    shapes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return tuple(
        jax.random.normal(jax.random.key(i), (2, length, number, width))
        for i, (length, number) in enumerate(shapes)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "causal", "window", "has_segments"),
    sweep(
        1,
        [
            (256, 256, "grouped", True, None, False),
            (256, 256, "equal", True, 100, True),
            (128, 256, "equal", False, None, False),
            (256, 256, "equal", False, 64, False),
        ],
        unpack=True,
    ),
)
def test_outputs_and_gradients_are_those_of_blocks(
    queries: int, keys: int, heads: str, causal: bool, window: int | None, has_segments: bool
) -> None:
    q, k, v = arrays(queries, keys, HEADS[heads])
    segments = jnp.repeat(jnp.arange(4, dtype=jnp.int32), queries // 4)[None].repeat(2, 0)
    given = segments if has_segments else None
    pattern, visibility = Pattern(causal, window, 0.1, 0.0), Visibility(None, None, given, given)
    assert splash_refusal(pattern, q, k, visibility) is None
    outs, pulls = zip(
        jax.vjp(lambda *x: splash_attention(pattern, *x, None, given, interpret=True), q, k, v),
        jax.vjp(lambda *x: blocked_attention(pattern, Operands(*x, None, visibility)), q, k, v),
        strict=True,
    )
    assert_close(outs[0], outs[1])
    gradient = jax.random.normal(jax.random.key(9), outs[0].shape)
    assert_close(pulls[0](gradient), pulls[1](gradient))


@pytest.mark.slow
def test_sinks_caps_and_narrower_values_are_those_of_blocks() -> None:
    q, k, v = arrays(256, 256, HEADS["grouped"], 192)
    v, sinks = v[..., :128], jnp.linspace(-1.0, 3.0, 4)
    pattern = Pattern(True, 100, 0.1, 0.0, soft_cap=2.0)
    outs, pulls = zip(
        jax.vjp(lambda *x: splash_attention(pattern, *x, None, interpret=True), q, k, v, sinks),
        jax.vjp(lambda *x: blocked_attention(pattern, Operands(*x)), q, k, v, sinks),
        strict=True,
    )
    assert_close(outs[0], outs[1])
    gradient = jax.random.normal(jax.random.key(9), outs[0].shape)
    assert_close(pulls[0](gradient), pulls[1](gradient))


X = jnp.ones((2, 256, 2, 64), jnp.bfloat16)
IDS = jnp.zeros((2, 256), jnp.int32)


@pytest.mark.parametrize(
    ("q", "options", "why"),
    [
        (X, {"causal": True}, None),
        (X, {"causal": True, "window": 7, "segment_ids": IDS}, None),
        (X, {"causal": True, "sinks": jnp.ones((2,)), "soft_cap": 5.0}, None),
        (X.astype(jnp.float16), {}, "the dtype is float16"),
        (X[:, :200], {}, "there are 200 queries and 200 keys"),
        (X, {"dropout_rate": 0.1, "key": jax.random.key(0)}, "probabilities are dropped"),
        (X, {"mask": jnp.ones((1, 1, 256, 256), bool)}, "there is a mask"),
        (X, {"lengths": jnp.ones((2,), jnp.int32)}, "there are lengths"),
        (X, {"segment_ids": (IDS, IDS + 0)}, "queries have other segment_ids than keys"),
    ],
)
def test_on_tpus_it_is_taken_where_it_can_be(
    q: jax.Array,
    options: dict[str, Any],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(_attention, "traced_platform", lambda: "tpu")
    monkeypatch.setattr(_attention, "is_first", lambda _: True)
    monkeypatch.setattr(_attention, "_splash", lambda *args: taken.append("splash") or args[1])
    with caplog.at_level(logging.INFO, "jaxpipe"):
        jaxpipe.attention(q, q, q, **options)
    assert taken == ([] if why else ["splash"])
    assert (f"blocked, because {why}" if why else "splash, because the devices") in caplog.text
    if why:
        with pytest.raises(LayerError, match=f"a TPU's attention must be able .* {why}"):
            jaxpipe.attention(q, q, q, implementation="splash", **options)


def test_elsewhere_it_is_refused() -> None:
    with pytest.raises(LayerError, match="platform 'cpu', not TPUs. Leave implementation out"):
        jaxpipe.attention(X, X, X, implementation="splash")
