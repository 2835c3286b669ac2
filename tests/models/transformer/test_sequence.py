"""Attention over a mesh axis `sequence`, by heads and in a ring, beside attention on one device."""

import functools
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import check_refused
from _tolerances import assert_close
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe import attention
from jaxpipe.errors import LayerError
from jaxpipe.models.transformer import _attention, _blocked, _ring, constrained, stream_axes

B, T, N, K, D = 2, 64, 4, 2, 8
RING = {"stage": 1, "sequence": 4}
IDS = jnp.cumsum(jax.random.bernoulli(jax.random.key(7), 0.06, (B, T)), 1).astype(jnp.int32)
EXTRAS = {"sinks": jnp.linspace(-1.0, 2.0, N), "soft_cap": 2.0}


def on_mesh(function: Any, axes: dict[str, int]) -> Any:
    """A function of arrays, `stage` manual and all other axes automatic, as inside of a stage."""
    sizes = tuple(axes.values())
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False
    )
    return jax.jit(mapped)


def inputs(kv_heads: int = K, size: int = D, length: int = T) -> tuple[Any, ...]:
    shapes = (N, D), (kv_heads, D), (kv_heads, size), (N, size)
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(
        jax.random.normal(key, (B, length, *shape)) for key, shape in zip(keys, shapes, strict=True)
    )


def with_gradients(
    q: Any, k: Any, v: Any, grad: Any, sinks: Any = None, segment_ids: Any = None, **given: Any
) -> Any:
    def attend(*x: Any) -> jax.Array:
        # Divided along the positions, as by the layer around it.
        q, k, v = (constrained(y, *stream_axes(*y.shape[:2])) for y in x[:3])
        return attention(q, k, v, sinks=x[3], segment_ids=segment_ids, **given)

    out, pullback = jax.vjp(attend, q, k, v, sinks)
    return out, pullback(grad)


def check(axes: dict[str, int], way: Any, arrays: tuple[Any, ...], **given: Any) -> Any:
    """Compare with one device; returns the text of the compiled program."""
    ids, sinks = given.pop("segment_ids", None), given.pop("sinks", None)
    args = *arrays, sinks, ids
    wanted = jax.jit(functools.partial(with_gradients, **given))(*args)
    mapped = on_mesh(functools.partial(with_gradients, sequence=way, **given), axes)
    compiled = mapped.lower(*args).compile()
    assert_close(jax.device_get(compiled(*args)), jax.device_get(wanted))
    return compiled.as_text()


def times(name: str, text: str) -> int:
    return len(re.findall(rf" {name}(?:-start)?\(", text))


CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "causal window": (RING, {"size": 2 * D}, {"causal": True, "window": 30, **EXTRAS}),
    "segments": (RING, {}, {"causal": True, "segment_ids": IDS}),
    "lengths": (RING, {}, {"lengths": jnp.array([T, 3], jnp.int32), **EXTRAS}),
    "model and fsdp": (
        {"stage": 1, "fsdp": 2, "model": 2, "sequence": 2},
        {},
        {"causal": True, "segment_ids": IDS, **EXTRAS},
    ),
    "window around": (RING, {"size": D // 2}, {"window": 5, "segment_ids": IDS}),
    "one key head": (RING, {"kv_heads": 1}, {"causal": True}),
}


@pytest.mark.parametrize("name", sweep(1, list(CASES)))
def test_a_ring_gives_what_one_device_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocked, "BLOCK", 8)
    axes, sizes, given = CASES[name]
    check(axes, "ring", inputs(**sizes), **given)


@pytest.mark.slow
def test_devices_pass_keys_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on accelerators: simulated devices would exchange among all."""
    monkeypatch.setattr(_ring, "traced_platform", lambda: "gpu")
    text = check(RING, "ring", inputs(), causal=True, segment_ids=IDS)
    # Keys, values and segments in each round, gradients of keys and values on the way, and home.
    assert times("collective-permute", text) == 3 + (3 + 2) + 2
    assert times("all-gather", text) == 0


@pytest.mark.parametrize(
    "axes",
    sweep(1, [{"stage": 1, "model": 2, "sequence": 2}, {"stage": 1, "sequence": 2, "fsdp": 2}]),
)
def test_heads_are_exchanged_for_positions_and_back(axes: dict[str, int]) -> None:
    given = {"causal": True, "segment_ids": IDS, "dropout_rate": 0.2, "key": jax.random.key(3)}
    text = check(axes, "ulysses", inputs(4), **given, **EXTRAS)
    assert times("all-to-all", text) >= 4
    assert times("collective-permute", text) == 0


@pytest.mark.parametrize(
    ("kv_heads", "given", "said"),
    [
        (4, {}, "blocked by heads over 'sequence', because 4 places divide 4 key heads, and"),
        (2, {}, "blocked in a ring over 'sequence', because 4 places do not divide 2 key heads"),
        (
            2,
            {"mask": jnp.ones((1, 1, 1, T), bool)},
            "blocked on each device of 'sequence', because 4 places do not divide 2 key heads, and "
            "for a ring there is a mask, and the devices are",
        ),
    ],
)
def test_the_log_says_how_positions_meet(
    kv_heads: int,
    given: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_attention, "is_first", lambda _: True)
    q, k, v, _ = inputs(kv_heads)
    with caplog.at_level(logging.INFO, "jaxpipe"):
        jax.eval_shape(on_mesh(lambda *x: attention(*x, **given), RING), q, k, v)
    assert said in caplog.text


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("rings", {}, "one of auto, ulysses, ring, but got 'rings'"),
    ("ulysses", {}, "'ulysses' must be possible over the 4 places of .*: 4 places do"),
    ("ring", {"mask": jnp.ones((1, 1, 1, T), bool)}, "got: there is a mask. Leave"),
    ("ring", {"dropout_rate": 0.1, "key": jax.random.key(0)}, "got: probabilities are dropped"),
    ("ring", {"implementation": "xla"}, "in blocks, but got implementation='xla'"),
    ("ring", {"keys": 2 * T}, "got: there are 64 queries and 128 keys"),
    ("ring", {"length": 68}, "got: there are 68 positions, and a ring of 4 takes multiples of 16"),
]


def test_what_is_not_possible_is_refused() -> None:
    for way, options, words in REFUSED:
        given = dict(options)
        length = given.pop("length", T)
        q, _, _, _ = inputs(length=length)
        _, k, v, _ = inputs(length=given.pop("keys", length))
        call = functools.partial(attention, causal=True, sequence=way, **given)
        check_refused(LayerError, [(words, jax.eval_shape)], on_mesh(call, RING), q, k, v)


def test_without_the_axis_the_ways_change_nothing() -> None:
    q, k, v, _ = inputs()
    plain, ring = (
        jax.make_jaxpr(functools.partial(attention, sequence=way))(q, k, v)
        for way in ("auto", "ring")
    )
    assert str(plain) == str(ring)
