"""Statistics over the samples of all replicas, against one device that has them all."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss
from flax import nnx

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.topology import make_pipeline_mesh

DIM, SIZE, REPLICAS, MICROBATCHES = 4, 3, 2, 2


class _Block(nn.Module):
    axis: str | None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.axis)(
            nn.Dense(DIM, use_bias=False)(x)
        )
        return jnp.tanh(x)


class _NNXBlock(nnx.Module):
    def __init__(self, axis: str | None, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, axis_name=axis, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.norm(self.linear(x)))


def _module(axis: str | None, block: Any, **kwargs: Any) -> PipelineModule:
    layers = [LayerSpec(block, axis), LayerSpec(block, axis), nn.Dense(2)]
    return PipelineModule(layers, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), **kwargs)


def _batch() -> tuple[np.ndarray, np.ndarray, dict]:
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, SIZE * REPLICAS)
    return rng.normal(size=(*shape, DIM)).astype("f"), rng.normal(size=(*shape, 2)).astype("f"), {}


@pytest.mark.parametrize(
    ("block", "stages", "schedule"),
    sweep(
        0, [(_Block, 2, "1f1b"), (_NNXBlock, 2, "zero-bubble"), (_Block, 1, "1f1b")], unpack=True
    ),
)
def test_statistics_over_data_are_those_of_the_whole_microbatch(
    block: Any, stages: int, schedule: str
) -> None:
    topology = PipeDataParallelTopology(stages, REPLICAS)
    inputs, labels, _ = batch = _batch()
    pipeline = Pipeline(
        _module("data", block, topology=topology),
        optax.identity(),
        make_pipeline_mesh(topology),
        (inputs[0], labels[0]),
        MICROBATCHES,
        make_settings(schedule=schedule),
    )
    state = pipeline.init()
    metrics, storage, held = pipeline.gradients(state, batch)
    grads, collections = pipeline.params_tree(storage), pipeline.states.collections_tree(held)

    alone = _module(None, block, num_stages=1)
    params = alone.init(jax.random.key(alone.base_seed), inputs[0])
    kept = alone.init_collections(jax.random.key(alone.base_seed), inputs[0])

    def loss(params: Any, kept: Any, m: int) -> Any:
        outputs, kept, _ = alone.call(params, kept, inputs[m], train=True, key=jax.random.key(0))
        return alone.loss(outputs, labels[m]), kept

    total, wanted = 0.0, None
    for m in range(MICROBATCHES):
        (value, kept), one = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)(
            params, kept, m
        )
        total += value / MICROBATCHES
        one = jax.tree.map(lambda g: g / MICROBATCHES, one)
        wanted = one if wanted is None else jax.tree.map(jnp.add, wanted, one)
    assert_loss(metrics["loss"], total)
    assert_close(grads, jax.device_get(wanted))
    assert_close(collections, jax.device_get(kept))
    # The module with the axis is a model for one device too, on which `data` is one wide.
    calls = [
        jax.jit(lambda p, c, m=m: m.call(p, c, inputs[0], train=True))
        for m in (pipeline.module, alone)
    ]
    again, by_hand = (jax.device_get(call(params, kept)) for call in calls)
    assert_close(again, by_hand)


def test_a_layer_that_needs_the_replicas_is_measured_like_others() -> None:
    topology = PipeDataParallelTopology(2, REPLICAS)
    inputs, labels, _ = _batch()
    module = _module("data", _Block, topology=topology, partition_method="profile:flops")
    mesh = make_pipeline_mesh(topology)
    pipeline = Pipeline(module, optax.identity(), mesh, (inputs[0], labels[0]), MICROBATCHES)
    assert len(pipeline.plan.parts) == 3
