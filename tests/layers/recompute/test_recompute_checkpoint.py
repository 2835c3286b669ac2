import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.deepspeed import CheckpointFunction, non_reentrant_checkpoint
from jaxpipe.errors import PipelineError
from jaxpipe.layers.recompute import RecomputeSettings, checkpoint

HOST = RecomputeSettings(checkpoint_in_cpu=True)


@pytest.fixture(autouse=True, params=[RecomputeSettings(), HOST], ids=["plain", "host"])
def settings(request: pytest.FixtureRequest) -> Iterator[RecomputeSettings]:
    with jaxpipe.checkpointing.use_settings(request.param):
        yield request.param


def _kept(function: Callable[..., Any], *args: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and memory of the floating-point arrays that wait for the backward pass."""
    _, pullback = jax.vjp(function, *args)
    leaves = [
        leaf
        for leaf in jax.tree.leaves(pullback)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.ndim
    ]
    return sorted((leaf.shape, leaf.sharding.memory_kind) for leaf in leaves)


def _deep(x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.sin(x * x)
    return x


@pytest.mark.parametrize("call", [checkpoint, non_reentrant_checkpoint, CheckpointFunction.apply])
def test_values_and_gradients_are_the_functions(call: Callable[..., Any]) -> None:
    x = jnp.linspace(0.1, 1.0, 6)
    np.testing.assert_allclose(call(_deep, x), _deep(x), rtol=1e-6)
    ours = jax.jit(jax.grad(lambda x: call(_deep, x).sum()))(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: _deep(x).sum())(x), rtol=1e-6)


def test_inputs_alone_are_kept(settings: RecomputeSettings) -> None:
    memory = "pinned_host" if settings.checkpoint_in_cpu else "device"
    assert _kept(functools.partial(checkpoint, _deep), jnp.ones(6)) == [((6,), memory)]
    assert len(_kept(_deep, jnp.ones(6))) > 1


def test_what_a_function_closes_over_has_a_gradient_and_stays_on_the_device(
    settings: RecomputeSettings,
) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return checkpoint(lambda x: _deep(x @ w), x).sum()

    w, x = jnp.full((3, 3), 0.3), jnp.ones((2, 3))
    expected = jax.grad(lambda w, x: _deep(x @ w).sum(), argnums=(0, 1))(w, x)
    for ours, theirs in zip(jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert ((3, 3), "device") in _kept(loss, w, x)
    assert ((3, 3), "pinned_host") not in _kept(loss, w, x)


def test_pytrees_integers_keys_and_python_values_pass() -> None:
    def function(
        tree: dict[str, Any], key: jax.Array, flag: bool, name: str, factor: float
    ) -> dict[str, Any]:
        assert flag is True
        noise = jax.random.normal(key, tree["x"].shape)
        return {name: (tree["x"] * noise * factor, tree["i"] + 1), "unused": tree["other"]}

    tree = {"x": jnp.arange(3.0), "i": jnp.arange(3), "other": np.ones(2, np.float32)}
    key = jax.random.key(1)

    def loss(tree: dict[str, Any], call: Callable[..., Any]) -> jax.Array:
        out = call(function, tree, key, True, "y", 2.0)
        return jnp.sum(out["y"][0] ** 2) + 3 * out["unused"].sum()

    plain = functools.partial(loss, call=lambda function, *args: function(*args))
    ours = jax.grad(functools.partial(loss, call=checkpoint), allow_int=True)(tree)
    theirs = jax.grad(plain, allow_int=True)(tree)
    for name in ("x", "other"):
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)
    out = checkpoint(function, tree, key, True, "y", 2.0)
    np.testing.assert_array_equal(out["y"][1], [1, 2, 3])


def test_dropout_is_the_same_in_both_runs() -> None:
    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * x, 0.0)

    x, key = jnp.arange(1.0, 33.0), jax.random.key(3)
    ours = jax.grad(lambda x: checkpoint(drop, x, key).sum())(x)
    np.testing.assert_array_equal(ours, jax.grad(lambda x: drop(x, key).sum())(x))


def test_under_scan_and_vmap() -> None:
    def loss(call: Callable[..., Any], w: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return call(lambda x: _deep(x * w) + 0.1 * jax.random.normal(key, x.shape), x), None

        return jax.vmap(lambda x: jax.lax.scan(body, x, jax.random.split(jax.random.key(0), 3))[0])(
            x
        ).sum()

    w, x = jnp.linspace(0.5, 1.0, 4), jnp.linspace(0.1, 1.0, 8).reshape(2, 4)
    ours = jax.jit(jax.grad(functools.partial(loss, checkpoint), argnums=(0, 1)))(w, x)
    theirs = jax.grad(functools.partial(loss, lambda f, x: f(x)), argnums=(0, 1))(w, x)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_checkpoints_nest() -> None:
    def outer(x: jax.Array) -> jax.Array:
        return checkpoint(_deep, checkpoint(_deep, x))

    x = jnp.linspace(0.1, 1.0, 4)
    ours = jax.grad(lambda x: checkpoint(outer, x).sum())(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: _deep(_deep(x)).sum())(x), rtol=1e-6)


def test_gradients_of_gradients(settings: RecomputeSettings) -> None:
    with jaxpipe.checkpointing.use_settings(dataclasses.replace(settings, checkpoint_in_cpu=False)):
        ours = jax.grad(jax.grad(lambda x: checkpoint(jnp.sin, x)))(0.5)
    np.testing.assert_allclose(ours, -np.sin(0.5), rtol=1e-6)


def test_profile_names_the_function_in_both_runs(settings: RecomputeSettings) -> None:
    with jaxpipe.checkpointing.use_settings(dataclasses.replace(settings, profile=True)):
        text = (
            jax.jit(jax.grad(lambda x: checkpoint(_deep, x).sum()))
            .lower(jnp.ones(3))
            .as_text(debug_info=True)
        )
    assert "checkpoint/_deep" in text
    assert re.search("rematted_computation.*checkpoint/_deep", text)


class _Compact(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        dense, drop = nn.Dense(4), nn.Dropout(0.5, deterministic=not train)
        return jaxpipe.checkpointing.checkpoint(lambda x: drop(nn.tanh(dense(x))), x)


class _Setup(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(4)

    def __call__(self, x: jax.Array) -> jax.Array:
        return checkpoint(self.dense, x)


class _Method(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(4)

    def inner(self, x: jax.Array, scale: float) -> jax.Array:
        return scale * self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return checkpoint(functools.partial(self.inner, scale=2.0), x)


@pytest.mark.parametrize("cls", sweep(1, [_Compact, _Setup, _Method], rest=pytest.mark.slow))
def test_linen_modules_may_call_it(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    module = PipelineModule([LayerSpec(cls), jnp.tanh], num_stages=1)
    x, key = jnp.linspace(0.0, 1.0, 12).reshape(3, 4), jax.random.key(1)
    params = module.init(jax.random.key(0), x)

    def grads() -> Any:
        return jax.jit(jax.grad(lambda p: module.apply(p, x, train=True, key=key).sum()))(params)

    ours = grads()
    for target in (f"{__name__}.checkpoint", "jaxpipe.checkpointing.checkpoint"):
        monkeypatch.setattr(target, lambda function, *args: function(*args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, grads())


def test_the_autograd_function_is_refused_by_name() -> None:
    words = "CheckpointFunction ... Use jaxpipe.checkpointing.checkpoint(function"
    for call in (CheckpointFunction, CheckpointFunction.forward, CheckpointFunction.backward):
        assert_refused(PipelineError, words, call, jnp.ones(2))
