"""Weights sharded over the mesh axis `model` by their metadata.

Against the same model on one device.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _parallel import (
    DIM,
    HIDDEN,
    make_batch,
    make_module,
    make_pipeline,
    reference,
    sequential,
    sharded,
    split,
)
from _tolerances import GRADIENT, assert_close, assert_loss

from jaxpipe import LayerSpec, Pipeline, PipelineModule, PipeModelDataParallelTopology, TrainState
from jaxpipe.layers.recompute import RecomputeSettings, use_settings
from jaxpipe.topology import make_pipeline_mesh

STEPS, LIMIT = 3, 0.5
ADAM = optax.adam(1e-2)


def sequential_steps(name: str, data: int) -> tuple[Any, list[Any], list[float]]:
    """Parameters after some steps of clipped Adam, and every step's gradients and loss."""
    params = sequential(name)[0]
    optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), ADAM)
    update = jax.jit(optimizer.update)
    state, found, losses = optimizer.init(params), [], []
    for step in range(STEPS):
        loss, grads = reference(name, make_batch(step, data), data, params, step)
        updates, state = update(grads, state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
        found.append(grads)
        losses.append(loss)
    return params, found, losses


@pytest.mark.parametrize(
    ("name", "stages", "model", "data"),
    sweep(
        1,
        [("linen", 1, 2, 1), ("nnx", 2, 2, 1), ("dropout", 2, 2, 2), ("linen", 2, 4, 1)],
        unpack=True,
    ),
)
def test_every_gradient_and_three_clipped_steps(
    name: str, stages: int, model: int, data: int
) -> None:
    pipeline = make_pipeline(name, stages, model, data, ADAM, gradient_clipping=LIMIT)
    wanted, all_grads, losses = sequential_steps(name, data)
    state = pipeline.init()
    assert_close(pipeline.params_tree(state.params), sequential(name)[0])
    for step, (grads, loss) in enumerate(zip(all_grads, losses, strict=True)):
        metrics, storage, _ = pipeline.gradients(state, make_batch(step, data))
        assert_loss(metrics["loss"], loss, tolerance=(step + 1) * 1e-6)
        if step == 0:
            assert_close(pipeline.params_tree(storage), grads)
        state, metrics = pipeline.update(state, storage)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=GRADIENT)
        assert metrics["grad_norm"] > LIMIT
    assert_close(pipeline.params_tree(state.params), wanted)
    check_copies(state)


def check_copies(state: TrainState) -> None:
    """What is not sharded is the same on all devices of a stage to the bit."""
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        found: dict[str, Any] = {}
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)
            assert np.array_equal(found.setdefault(str(shard.index), value), value)


@pytest.mark.soak
def test_zero_divides_each_place_over_its_replicas() -> None:
    pipeline = make_pipeline("tied", 2, 2, 2, ADAM, gradient_clipping=LIMIT, zero_stage=1)
    wanted, grads, losses = sequential_steps("tied", 2)
    state = pipeline.states.init_from(sequential("tied")[0])
    for step in range(STEPS):
        state, metrics = pipeline.step(state, make_batch(step, 2))
        assert_loss(metrics["loss"], losses[step], tolerance=(step + 1) * 1e-6)
        np.testing.assert_allclose(
            metrics["grad_norm"], optax.tree.norm(grads[step]), rtol=GRADIENT
        )
    assert_close(pipeline.params_tree(state.params), wanted)
    assert {leaf.shape[0] for leaf in jax.tree.leaves((state.params, state.opt_state))} == {4}
    check_copies(state)


@pytest.mark.soak
def test_evaluation_and_prediction() -> None:
    pipeline = make_pipeline("tied", 2, 2, 1, ADAM)
    inputs, labels, side = make_batch()
    metrics, outputs = pipeline.programs.evaluate_and_predict(
        pipeline.init(), (inputs, labels, side)
    )
    module, params = make_module("tied"), sequential("tied")[0]
    wanted = np.stack([module.apply(params, x) for x in inputs])
    np.testing.assert_allclose(outputs, wanted, rtol=GRADIENT, atol=GRADIENT)
    assert_loss(
        metrics["microbatch_losses"],
        [module.loss(y, t) for y, t in zip(wanted, labels, strict=True)],
        tolerance=GRADIENT,
    )


class Stats(nn.Module):
    """Keeps means of features that are split, and counts calls; reports a loss of its own."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        init = sharded(nn.initializers.lecun_normal(), None, "model")
        y = jnp.tanh(split(x @ self.param("wide", init, (DIM, HIDDEN))))
        mean = self.variable("batch_stats", "mean", sharded(lambda: jnp.zeros(HIDDEN), "model"))
        count = self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * y.mean((0, 1))
            count.value += 1
        self.sow("losses", "size", 0.1 * jnp.sum(y**2))
        narrow = self.param(
            "narrow", sharded(nn.initializers.lecun_normal(), "model", None), (HIDDEN, DIM)
        )
        return x + (y - mean.value.reshape(1, 1, -1)) @ narrow


def stats_module(stages: int, model: int) -> PipelineModule:
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=model, num_dp=1)
    layers = [nn.Embed(12, DIM), LayerSpec(Stats), LayerSpec(Stats), nn.Dense(12)]
    return PipelineModule(
        layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t[..., None]) ** 2)
    )


@pytest.mark.soak
def test_collections_and_reported_losses() -> None:
    module, (inputs, labels, side) = stats_module(2, 2), make_batch()
    pipeline = Pipeline(
        module, ADAM, make_pipeline_mesh(module.topology()), (inputs[0], labels[0]), len(inputs)
    )
    state = pipeline.init()
    alone = stats_module(1, 1)
    params = pipeline.params_tree(state.params)
    kept = alone.init_collections(jax.random.key(alone.base_seed), inputs[0])
    assert_close(pipeline.states.collections_tree(state.collections), jax.device_get(kept))

    def loss(params: Any, kept: Any, x: Any, t: Any) -> Any:
        outputs, kept, aux = alone.call(params, kept, x, train=True)
        return alone.loss(outputs, t) + sum(aux["losses"].values()), kept

    gradient, total = jax.jit(jax.value_and_grad(loss, has_aux=True)), []
    for x, t in zip(inputs, labels, strict=True):
        (value, kept), grads = gradient(params, kept, x, t)
        total.append((value, grads))
    wanted_loss, wanted = jax.tree.map(lambda *xs: np.mean(xs, 0), *jax.device_get(total))
    metrics, storage, collections = pipeline.gradients(state, (inputs, labels, side))
    assert_loss(metrics["loss"], wanted_loss)
    assert_close(pipeline.params_tree(storage), wanted)
    assert_close(pipeline.states.collections_tree(collections), jax.device_get(kept))


@pytest.mark.soak
def test_kept_inputs_in_shares_over_the_axis() -> None:
    module = make_module("dropout", 2, 2, 1, activation_checkpoint_interval=1)
    batch = make_batch()
    found = {}
    for partitioned in (False, True):
        with use_settings(RecomputeSettings(partition_activations=partitioned, configured=True)):
            mesh = make_pipeline_mesh(module.topology())
            pipeline = Pipeline(module, ADAM, mesh, (batch[0][0], batch[1][0]), len(batch[0]))
            metrics, storage, _ = pipeline.gradients(pipeline.init(), batch)
        found[partitioned] = pipeline.sizes.residual_bytes[0]
        loss, grads = reference("dropout", batch, 1)
        assert_loss(metrics["loss"], loss)
        assert_close(pipeline.params_tree(storage), grads)
    assert found[True] < 0.7 * found[False]
