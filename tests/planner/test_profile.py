"""What layers cost, measured and counted, and the cut that follows."""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _parallel import make_batch, make_module

from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.jaxpr import count_kernels, num_flops
from jaxpipe.layers import VocabEmbed, VocabHead, vocab_cross_entropy
from jaxpipe.partition import LayerCost, Profile, StageMemory
from jaxpipe.planner import _costs, _profile
from jaxpipe.planner._costs import layer_costs, layer_work
from jaxpipe.planner._profile import counted_s, cut_module, measured_s, profile_layers
from jaxpipe.topology import make_pipeline_mesh

X = np.ones((2, 4), np.float32)
SLOW_S, QUICK_S = 0.06, 0.01


def _sleep(seconds: float, x: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    return x


@functools.cache
def sleep_both_ways(forward_s: float, backward_s: float) -> Callable[[jax.Array], jax.Array]:
    def wait(seconds: float, x: jax.Array) -> jax.Array:
        return jax.pure_callback(functools.partial(_sleep, seconds), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    layer = jax.custom_vjp(lambda x: wait(forward_s, x))
    layer.defvjp(lambda x: (wait(forward_s, x), None), lambda _, dy: (wait(backward_s, dy),))
    return layer


class Sleeper(nn.Module):
    forward_s: float
    backward_s: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return sleep_both_ways(self.forward_s, self.backward_s)(x + self.param("b", nn.initializers.zeros, x.shape))


def _mse(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def _slow_loss(y: jax.Array, t: jax.Array) -> jax.Array:
    return _mse(sleep_both_ways(SLOW_S, SLOW_S)(y), t)


def _sleepers(*names: str, loss_fn: Any = _mse, method: str = "profile") -> PipelineModule:
    """Layers by letter: quick, or slow in the forward, the backward, or both."""
    seconds = {"q": (QUICK_S, QUICK_S), "f": (SLOW_S, QUICK_S), "b": (QUICK_S, SLOW_S), "s": (SLOW_S, SLOW_S)}
    return PipelineModule([LayerSpec(Sleeper, *seconds[n]) for n in names], 2, loss_fn=loss_fn, partition_method=method)


MESH = make_pipeline_mesh(PipeDataParallelTopology(2, 1), jax.devices()[:2])
MEASURED = functools.partial(measured_s, rounds=1)


def flops(function: Any, *structs: Any) -> float:
    return num_flops(count_kernels(function, structs))


@pytest.mark.slow
def test_sleeping_layers_are_timed_and_cut_at_the_optimum(caplog: pytest.LogCaptureFixture) -> None:
    module = _sleepers("s", "q", "b", "q", "f", "q")
    trace = module.trace(X)
    with caplog.at_level(logging.INFO, "jaxpipe"):
        parts, profile = cut_module(module, trace, MESH, labels=X, memory=StageMemory((3, 1)))
    assert parts == (0, 2, 6)
    assert profile is not None
    slow, quick, back, _, front, _ = profile.layers
    assert min(slow.forward_s, slow.backward_s, back.backward_s, front.forward_s) >= SLOW_S
    assert max(quick.forward_s, quick.backward_s, back.forward_s, front.backward_s) < SLOW_S
    assert profile.layers[1] == profile.layers[3]
    assert "cut by partition_method='profile':\nstage  layers" in caplog.text
    assert "times: measured on cpu" in caplog.text
    assert "in flight" in caplog.text


def test_the_loss_counts_with_the_last_layer() -> None:
    module = _sleepers("q", "q", "q", loss_fn=_slow_loss)
    trace = module.trace(X)
    assert cut_module(module, trace, MESH, labels=X)[0] == (0, 2, 3)
    without = layer_costs(module, trace, None, MEASURED)
    assert without[-1].forward_s < SLOW_S


def test_recompute_counts_with_the_backward() -> None:
    layers = [lambda x: jnp.sin(sleep_both_ways(SLOW_S, QUICK_S)(x))]
    module = PipelineModule(layers, 1, loss_fn=_mse, activation_checkpoint_interval=1)
    (cost,) = layer_costs(module, module.trace(X), None, MEASURED)
    assert cost.backward_s >= SLOW_S + QUICK_S
    assert cost.residual_bytes == X.nbytes
    assert cost.recomputed_bytes > 0


class Flat(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.param("w", nn.initializers.ones, (x.shape[-1], self.size))


class Stacked(nn.Module):
    """Several products in a scan."""

    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("w", nn.initializers.ones, (self.num_layers, x.shape[-1], x.shape[-1]))
        return jax.lax.scan(lambda y, each: (y @ each, None), x, w)[0]


def test_products_are_counted_and_scans_as_often_as_they_run() -> None:
    layers = [LayerSpec(nn.Embed, 100, 16), LayerSpec(Flat, 16), LayerSpec(Stacked, 5), LayerSpec(Flat, 64)]
    module = PipelineModule(layers, 2, loss_fn=_mse, partition_method="profile:flops")
    ids = np.zeros((32,), np.int32)
    trace = module.trace(ids)
    costs = layer_costs(module, trace, None, flops, split_backward=True)
    product = 2 * 32 * 16 * 16
    forwards = [layer.forward_s for layer in costs]
    assert forwards[0] < product / 100
    assert forwards[1:] == [product, 5 * product, 4 * product]
    assert [layer.backward_s for layer in costs[1:]] == [2 * f for f in forwards[1:]]
    assert [layer.weight_s for layer in costs[1:]] == forwards[1:]
    assert costs[0].weight_s == costs[0].backward_s
    parts, known = cut_module(module, trace, MESH)
    assert parts == (0, 3, 4)
    assert known is not None
    assert known.source == "estimated, 1e+14 FLOP/s and 1e+12 B/s"
    assert cut_module(module.replace(), trace, MESH)[1] == known == profile_layers(module, trace, MESH, None, "counts")
    assert known.layers == layer_costs(module, trace, None, counted_s)


def test_recompute_is_counted() -> None:
    module = PipelineModule([LayerSpec(nn.Sequential, [nn.Dense(8), nn.relu, nn.Dense(8)])], 1)
    x = np.ones((4, 8), np.float32)
    plain, again = (
        layer_costs(m, m.trace(x), None, flops)[0] for m in (module, module.replace(activation_checkpoint_interval=1))
    )
    product = 2 * 4 * 8 * 8
    assert again.backward_s >= plain.backward_s + product
    assert again.residual_bytes == x.nbytes < plain.residual_bytes == again.recomputed_bytes


@pytest.mark.parametrize("seconds", [MEASURED, counted_s], ids=["measured", "estimated"])
def test_split_backward(seconds: Any) -> None:
    module = PipelineModule([LayerSpec(nn.Dense, 16), jnp.tanh, LayerSpec(nn.Dense, 8)], 1, loss_fn=_mse)
    trace = module.trace(np.ones((4, 8), np.float32))
    costs = layer_costs(module, trace, np.ones((4, 8), np.float32), seconds, split_backward=True)
    assert all(0 < cost.weight_s <= cost.backward_s for cost in (costs[0], costs[2]))
    assert costs[1].weight_s == 0
    assert [cost.pending_bytes for cost in costs] == [4 * 16 * 4, 0, 4 * 8 * 4]


@pytest.mark.slow
def test_layers_split_over_a_model_axis_count_for_their_share() -> None:
    module = make_module("dropout", stages=2, model=2)
    inputs, labels, _ = make_batch()
    trace = module.trace(inputs[0], {}, make_pipeline_mesh(module.topology()).abstract_mesh)
    costs = layer_costs(module, trace, labels[0], MEASURED)
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in costs)


@pytest.mark.parametrize("seconds", [MEASURED, counted_s], ids=["measured", "estimated"])
def test_layers_that_all_stages_share_count_their_share_of_parameters(
    seconds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    monkeypatch.setattr(_costs, "layer_work", lambda *args: looked_at.append(args[2]) or layer_work(*args))
    layers = [LayerSpec(VocabEmbed, 32, 8), *[LayerSpec(nn.Dense, 8)] * 2, LayerSpec(VocabHead, 32)]
    module, tokens = (
        PipelineModule(layers, 2, loss_fn=functools.partial(vocab_cross_entropy, num_embeddings=32)),
        np.zeros((2, 4), np.int32),
    )
    costs = layer_costs(module, module.trace(tokens), tokens, seconds)
    assert set(looked_at) == {1}
    assert [cost.num_params for cost in costs] == [32 * 8 // 2, 72, 72, 32 * 9 // 2]
    assert costs[0] == LayerCost(0.0, 0.0, num_params=128, is_stage_sharded=True)
    assert costs[3] == LayerCost(0.0, 0.0, num_params=144, is_stage_sharded=True)


def test_numbers_keep_every_digit_on_their_way_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = (LayerCost(0.1 + 0.2, 1 / 3, 1e-17, 5, 6, 7, True), LayerCost(0.0, 1e300))
    module = PipelineModule([jnp.sin, jnp.cos], 2, activation_checkpoint_interval=2)
    monkeypatch.setattr(_profile, "layer_costs", lambda *_, **__: costs)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_profile, "run_on_all", lambda function, who: function())
    monkeypatch.setattr(_profile, "gather_texts", lambda text: [text, "null"])
    profile = profile_layers(module, module.trace(X), MESH, X, "times")
    assert profile == Profile(costs, "measured on cpu", 2)
