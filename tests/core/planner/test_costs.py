"""What layers cost, measured and counted, and the cut that follows."""

import dataclasses
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
from jaxpipe.core.planner import HARDWARE, Counted, _measure
from jaxpipe.core.planner._cut import costs_for_cut, cut_parts, log_cut
from jaxpipe.core.planner._measure import measured_costs
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.partition import Profile, StageMemory
from jaxpipe.topology import make_pipeline_mesh

X = np.ones((2, 4), np.float32)
SLOW_S, QUICK_S = 0.06, 0.01


def _sleep(seconds: float, x: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    return x


@functools.cache
def sleep_both_ways(forward_s: float, backward_s: float) -> Callable[[jax.Array], jax.Array]:
    def wait(seconds: float, x: jax.Array) -> jax.Array:
        return jax.pure_callback(
            functools.partial(_sleep, seconds), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    layer = jax.custom_vjp(lambda x: wait(forward_s, x))
    layer.defvjp(lambda x: (wait(forward_s, x), None), lambda _, dy: (wait(backward_s, dy),))
    return layer


class Sleeper(nn.Module):
    forward_s: float
    backward_s: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return sleep_both_ways(self.forward_s, self.backward_s)(
            x + self.param("b", nn.initializers.zeros, x.shape)
        )


def _mse(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def _slow_loss(y: jax.Array, t: jax.Array) -> jax.Array:
    return _mse(sleep_both_ways(SLOW_S, SLOW_S)(y), t)


def _sleepers(*names: str, loss_fn: Any = _mse, method: str = "profile") -> PipelineModule:
    """Layers by letter: quick, or slow in the forward, the backward, or both."""
    seconds = {
        "q": (QUICK_S, QUICK_S),
        "f": (SLOW_S, QUICK_S),
        "b": (QUICK_S, SLOW_S),
        "s": (SLOW_S, SLOW_S),
    }
    return PipelineModule(
        [LayerSpec(Sleeper, *seconds[n]) for n in names],
        2,
        loss_fn=loss_fn,
        partition_method=method,
    )


MESH = make_pipeline_mesh(PipeDataParallelTopology(2, 1), jax.devices()[:2])


def counted(module: PipelineModule, trace: Any, labels: Any = None) -> Profile:
    return Counted(module, trace, labels).costs(HARDWARE["h200"])


def measured(module: PipelineModule, trace: Any, labels: Any = None) -> Profile:
    return measured_costs(Counted(module, trace, labels), MESH, counted(module, trace, labels))


@pytest.mark.slow
def test_sleeping_layers_are_timed_and_cut_at_the_optimum(caplog: pytest.LogCaptureFixture) -> None:
    module = _sleepers("s", "q", "b", "q", "f", "q")
    trace = module.trace(X)
    costs = measured(module, trace, X)
    memory = StageMemory((3, 1))
    assert cut_parts(module, trace, costs, 2, costs.signatures, memory) == (0, 2, 6)
    slow, quick, back, _, front, _ = costs.layers
    assert min(slow.forward_s, slow.backward_s, back.backward_s, front.forward_s) >= SLOW_S
    assert max(quick.forward_s, quick.backward_s, back.forward_s, front.backward_s) < SLOW_S
    assert costs.layers[1] == costs.layers[3]
    assert costs.source == "measured on cpu"
    with caplog.at_level(logging.INFO, "jaxpipe"):
        log_cut(module, trace, dataclasses.replace(costs, memory=memory), (0, 2, 6))
    assert "cut by partition_method='profile':\nstage  layers" in caplog.text
    assert "times: measured on cpu" in caplog.text
    assert "in flight" in caplog.text


def test_the_loss_counts_with_the_last_layer() -> None:
    module = _sleepers("q", "q", "q", loss_fn=_slow_loss)
    trace = module.trace(X)
    costs = measured(module, trace, X)
    assert cut_parts(module, trace, costs, 2, costs.signatures) == (0, 2, 3)
    assert costs.loss.forward_s >= SLOW_S > costs.layers[-1].forward_s
    assert measured(module, trace).loss.forward_s == 0


@pytest.mark.slow
def test_recompute_counts_with_the_backward() -> None:
    layers = [lambda x: jnp.sin(sleep_both_ways(SLOW_S, QUICK_S)(x))]
    module = PipelineModule(layers, 1, loss_fn=_mse, activation_checkpoint_interval=1)
    (cost,) = measured(module, module.trace(X)).layers
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
    layers = [
        LayerSpec(nn.Embed, 100, 16),
        LayerSpec(Flat, 16),
        LayerSpec(Stacked, 5),
        LayerSpec(Flat, 64),
    ]
    module = PipelineModule(layers, 2, loss_fn=_mse, partition_method="profile:flops")
    ids = np.zeros((32,), np.int32)
    trace = module.trace(ids)
    costs = counted(module, trace)
    product = 2 * 2 * 32 * 16 * 16  # of float32, at half the speed
    assert [layer.flops for layer in costs.layers] == [0, product, 5 * product, 4 * product]
    assert all(0 < layer.weight_s < layer.backward_s for layer in costs.layers[1:])
    assert costs.layers[0].weight_s == costs.layers[0].backward_s
    for_cut = costs_for_cut(Counted(module, trace, None), MESH)
    # Layers so small take less time than the gradients of their parameters off the trunk.
    assert cut_parts(module, trace, for_cut, 2, costs.signatures) == (0, 2, 4)
    assert for_cut.source == "counted for h100"
    assert for_cut == costs_for_cut(Counted(module.replace(), trace, None), MESH)


def test_recompute_is_counted() -> None:
    module = PipelineModule([LayerSpec(nn.Sequential, [nn.Dense(8), nn.relu, nn.Dense(8)])], 1)
    x = np.ones((4, 8), np.float32)
    plain, again = (
        counted(m, m.trace(x)).layers[0]
        for m in (module, module.replace(activation_checkpoint_interval=1))
    )
    assert again.backward_s > plain.backward_s
    assert again.residual_bytes == x.nbytes < plain.residual_bytes == again.recomputed_bytes
    assert plain.recomputed_bytes == 0


@pytest.mark.parametrize("costs_of", [measured, counted])
def test_split_backward(costs_of: Any) -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 16), jnp.tanh, LayerSpec(nn.Dense, 8)], 1, loss_fn=_mse
    )
    costs = costs_of(
        module, module.trace(np.ones((4, 8), np.float32)), np.ones((4, 8), np.float32)
    ).layers
    assert all(0 < cost.weight_s <= cost.backward_s for cost in (costs[0], costs[2]))
    assert costs[1].weight_s == 0
    assert [cost.pending_bytes for cost in costs] == [4 * 16 * 4, 0, 4 * 8 * 4]


@pytest.mark.slow
def test_layers_split_over_a_model_axis_count_for_their_share() -> None:
    module = make_module("dropout", stages=2, model=2)
    inputs, labels, _ = make_batch()
    mesh = make_pipeline_mesh(module.topology())
    trace = module.trace(inputs[0], {}, mesh.abstract_mesh)
    looked_at = Counted(module, trace, labels[0])
    costs = measured_costs(looked_at, mesh, looked_at.costs(HARDWARE["h200"]))
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in costs.layers)


@pytest.mark.slow
def test_layers_that_all_stages_share_count_their_share_of_parameters() -> None:
    layers = [LayerSpec(VocabEmbed, 32, 8), *[LayerSpec(nn.Dense, 8)] * 2, LayerSpec(VocabHead, 32)]
    loss_fn, tokens = lambda y, t: vocab_cross_entropy(y, t, 32).mean(), np.zeros((2, 4), np.int32)
    module = PipelineModule(layers, 2, loss_fn=loss_fn)
    trace = module.trace(tokens)
    for costs in (counted(module, trace, tokens), measured(module, trace, tokens)):
        assert [cost.num_params for cost in costs.layers] == [32 * 8 // 2, 72, 72, 32 * 9 // 2]
        assert [cost.is_stage_sharded for cost in costs.layers] == [True, False, False, True]
        assert costs.times()[0] == costs.times()[3] == (0.0, 0.0) < costs.times()[1]
        assert costs.stage_sharded_params == 128 + 144
        assert costs.part_sizes((0, 4)) == dataclasses.replace(
            costs, layers=costs.layers[1:3]
        ).part_sizes((0, 2))
    assert costs.layers[3].forward_s == costs.loss.forward_s == 0 < costs.layers[1].forward_s


def test_numbers_keep_every_digit_on_their_way_to_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = [[0.1 + 0.2, 1 / 3, 1e-17], [0.0, 1e300, 0.0], [0.0, 0.0, 0.0]]
    module = PipelineModule([jnp.sin, jnp.cos], 2, activation_checkpoint_interval=2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_measure, "run_on_all", lambda function, who: theirs)
    monkeypatch.setattr(_measure, "gather_texts", lambda text: [text, "null"])
    costs = measured(module, module.trace(X))
    assert [[x.forward_s, x.backward_s, x.weight_s] for x in (*costs.layers, costs.loss)] == theirs
