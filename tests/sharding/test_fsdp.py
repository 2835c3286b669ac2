"""Weights and samples divided over the axis `fsdp`, against one device.

By metadata or by the default rule.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import GRADIENT, assert_close, assert_loss
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology, describe_pipeline
from jaxpipe.topology import make_pipeline_mesh

DIM, HIDDEN, SAMPLES, MICROBATCHES, LIMIT = 8, 16, 8, 3, 0.5
ADAM = optax.adam(1e-2)
CHUNKED = ("interleaved", "1f1b-v", "zero-bubble-v")


class Block(nn.Module):
    """No word of `fsdp`; `model` where `inner` says so."""

    inner: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        wide, narrow = ((None, "model"), ("model", None)) if self.inner else ((), ())
        y = nn.LayerNorm()(x)
        y = nn.Dense(HIDDEN, kernel_init=nn.with_partitioning(init, wide) if wide else init)(y)
        return x + nn.Dense(
            DIM, kernel_init=nn.with_partitioning(init, narrow) if narrow else init
        )(jnp.tanh(y))


def make_module(inner: bool, **kwargs: Any) -> PipelineModule:
    layers = [
        LayerSpec(nn.Dense, DIM),
        *[LayerSpec(Block, inner) for _ in range(4)],
        LayerSpec(nn.Dense, 3),
    ]
    return PipelineModule(layers, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), **kwargs)


def make_batch(step: int = 0) -> tuple[Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(step)
    inputs, labels = (
        rng.normal(size=(MICROBATCHES, SAMPLES, n)).astype(np.float32) for n in (5, 3)
    )
    return inputs, labels, {}


def make_pipeline(
    stages: int, data: int, axes: dict[str, int], microbatches: int = MICROBATCHES, **settings: Any
) -> Pipeline:
    topology = ProcessTopology(["pipe", "data", *axes], [stages, data, *axes.values()])
    # With chunks a block in each part, and the ends off the trunk.
    cut = (
        [0, 2, 3, 4, 6]
        if settings.get("schedule") in CHUNKED
        else [0, 3, 6]
        if stages == 2
        else "uniform"
    )
    module = make_module("model" in axes, topology=topology, partition_method=cut)
    example = jax.tree.map(lambda x: x[0], make_batch())
    config = make_settings(gradient_clipping=LIMIT, **settings)
    return Pipeline(module, ADAM, make_pipeline_mesh(topology), example, microbatches, config)


@functools.cache
def sequential() -> tuple[list[float], Any, Any, Any]:
    """Three clipped steps of Adam on one device.

    Losses, first parameters, first gradients, last parameters.
    """
    module = make_module(False, num_stages=1)
    params = first = jax.device_get(
        module.init(jax.random.key(module.base_seed), make_batch()[0][0])
    )
    optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), ADAM)
    state, losses, all_grads = optimizer.init(params), [], []

    @jax.jit
    def mean(params: Any, inputs: Any, labels: Any) -> Any:
        return jnp.mean(
            jnp.stack(
                [
                    module.loss(module.apply(params, x), t)
                    for x, t in zip(inputs, labels, strict=True)
                ]
            )
        )

    for step in range(3):
        loss, grads = jax.value_and_grad(mean)(params, *make_batch(step)[:2])
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        all_grads.append(jax.device_get(grads))
    return losses, first, all_grads[0], jax.device_get(params)


@pytest.mark.parametrize(
    ("stages", "data", "axes", "settings"),
    sweep(
        1,
        [
            (2, 1, {"fsdp": 2}, {"gather_weights": "tick"}),
            (2, 1, {"fsdp": 2}, {"gather_weights": "tick", "schedule": "interleaved"}),
            (2, 1, {"fsdp": 4}, {"gather_weights": "step", "schedule": "zero-bubble"}),
            (2, 1, {"fsdp": 2, "model": 2}, {"skip_idle": False}),
            (2, 1, {"fsdp": 2}, {}),
            (2, 2, {"fsdp": 2}, {"zero_stage": 1}),
            (2, 4, {}, {"zero_stage": 2}),
            (2, 4, {}, {"zero_stage": 3}),
            (2, 2, {"model": 2}, {"zero_stage": 3}),
            (2, 1, {"fsdp": 2, "model": 2}, {"gather_weights": "step"}),
            (2, 1, {"fsdp": 4}, {"schedule": "interleaved"}),
            (2, 1, {"fsdp": 2, "model": 2}, {"gather_weights": "tick", "schedule": "1f1b-v"}),
            (2, 1, {"fsdp": 2}, {"gather_weights": "tick", "schedule": "zero-bubble-v"}),
            (
                2,
                1,
                {"fsdp": 4},
                {"gather_weights": "tick", "schedule": "interleaved", "scan_trunk": True},
            ),
            (
                2,
                2,
                {"fsdp": 2},
                {"gather_weights": "tick", "schedule": "interleaved", "zero_stage": 1},
            ),
            (
                2,
                4,
                {},
                {
                    "gather_weights": "tick",
                    "schedule": "interleaved",
                    "zero_stage": 3,
                    "skip_idle": True,
                },
            ),
            (
                1,
                1,
                {"fsdp": 4},
                {"gather_weights": "tick", "schedule": "interleaved", "num_chunks": 4},
            ),
            (2, 1, {"fsdp": 4}, {"scan_trunk": True}),
            (1, 1, {"fsdp": 4}, {}),
            (4, 1, {"fsdp": 2}, {"schedule": "gpipe"}),
        ],
        unpack=True,
    ),
)
def test_gradients_and_three_steps(
    stages: int, data: int, axes: dict[str, int], settings: dict[str, Any]
) -> None:
    pipeline = make_pipeline(stages, data, axes, **settings)
    losses, first, grads, last = sequential()
    state = pipeline.init()
    assert_close(pipeline.params_tree(state.params), first)
    metrics, storage, _ = pipeline.gradients(state, make_batch())
    assert_close(pipeline.params_tree(storage), grads)
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=GRADIENT)
    for step, loss in enumerate(losses):
        state, metrics = pipeline.step(state, make_batch(step))
        assert_loss(metrics["loss"], loss, tolerance=(step + 1) * 1e-6)
    assert_close(pipeline.params_tree(state.params), last)


@pytest.mark.soak
def test_an_engine_returns_the_outputs_of_all_samples() -> None:
    topology, (inputs, labels, _) = (
        ProcessTopology(["pipe", "data", "fsdp"], [2, 1, 4]),
        make_batch(),
    )
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // 4,
        "gradient_accumulation_steps": MICROBATCHES,
    }
    config |= {"gradient_clipping": LIMIT}
    entries = list(zip(inputs, labels, strict=True))
    engine = jaxpipe.initialize(
        model=make_module(False, topology=topology),
        optimizer=ADAM,
        config=config,
        example_batch=entries[0],
    )[0]
    losses, first, *_ = sequential()
    module = make_module(False, num_stages=1)
    wanted = jnp.stack([module.apply(first, x) for x in inputs])
    loss, outputs = engine.eval_batch(iter(entries), return_logits=True)
    assert_loss(loss, losses[0])
    assert_close(outputs, wanted)
    assert_close(engine.predict(inputs.reshape(-1, 5)), wanted.reshape(-1, 3))
    assert_loss(engine.train_batch(iter(entries)), losses[0])


@pytest.mark.parametrize("size", sweep(0, [2, 4]))
def test_bytes_at_rest_fall_by_the_axis(size: int) -> None:
    pipeline, whole = make_pipeline(2, 1, {"fsdp": size}), make_pipeline(2, 1, {"model": 1})

    def num_bytes(pipeline: Pipeline) -> dict[str, int]:
        """Bytes on one device of weights of two dims and of what belongs to them."""
        state = pipeline.init()
        gradients = pipeline.gradients(state, make_batch())[1]
        trees = {"params": state.params, "moments": state.opt_state, "gradients": gradients}
        return {
            name: sum(
                x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if x.ndim > 2
            )
            for name, tree in trees.items()
        }

    found, wanted = num_bytes(pipeline), num_bytes(whole)
    # Two blocks of two kernels on a stage; the ends are packed without the axis.
    trunk = 2 * 2 * DIM * HIDDEN * 4
    assert found["gradients"] == found["params"] > trunk // size
    assert found["moments"] == 2 * found["params"]
    assert wanted["params"] == trunk
    assert found["params"] == trunk // size + (5 * DIM + DIM * 3) * 4 // size


def test_metadata_wins_and_the_rest_follows_the_rule() -> None:
    pipeline = make_pipeline(2, 1, {"fsdp": 2, "model": 2})
    specs = {"/".join(path[1:]): spec for path, spec in pipeline.trace.tree_specs().items()}
    assert specs["1_Block/Dense_0/kernel"] == P("fsdp", "model")
    assert specs["1_Block/Dense_1/kernel"] == P("model", "fsdp")
    assert specs["0_Dense/kernel"] == P(None, "fsdp")
    assert specs["5_Dense/kernel"] == P("fsdp", None)
    assert not any("bias" in name or "scale" in name for name in specs)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gather_weights": "step"}, "gathered once a step, and held to its end"),
        ({}, "gathered by every forward and every backward"),
        ({"zero_stage": 2}, "gathered once a step"),
        ({"zero_stage": 3}, "gathered by every forward"),
    ],
)
def test_what_is_gathered_is_told(settings: dict[str, Any], match: str) -> None:
    data, axes = (2, {}) if "zero_stage" in settings else (1, {"fsdp": 2})
    pipeline = make_pipeline(2, data, axes, **settings)
    assert match in describe_pipeline(pipeline)
    kernels = 2 * 2 * DIM * HIDDEN + 5 * DIM + DIM * 3
    assert pipeline.sizes.gathered_bytes == pipeline.sizes.whole_sums_bytes == kernels * 4 // 2
    assert ("over 'data' with zero_optimization.stage=1, whose" in describe_pipeline(pipeline)) == (
        "once" in match
    )
