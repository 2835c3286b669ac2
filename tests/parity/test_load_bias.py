"""Parameters that a load moves, in every layout and precision, against one device."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.errors import LayerError
from jaxpipe.layers import LoadBias, load_bias, with_load
from jaxpipe.optim import LossScaler
from jaxpipe.topology import make_pipeline_mesh

WIDTH, MICROBATCHES, ROWS, RATE = 4, 3, 4, 0.125


def gated(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Features that are above minus their bias, and loads that are 0 for some of them."""
    is_open = jax.lax.stop_gradient(x + bias[None]) > 0
    return with_load(jnp.where(is_open, x, 0.1 * x), bias, 2 * is_open.sum(0) - len(x))


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = load_bias(nn.with_partitioning(nn.initializers.zeros, (None,)))
        return nn.Dense(WIDTH)(gated(x, self.param("threshold", init, (WIDTH,))))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Gated()(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        names = {nn.PARTITION_NAME: "layers"}
        stack = nn.scan(
            nn.remat(Step), {"params": 0}, split_rngs={"params": True}, length=2,
            metadata_params=names,
        )  # fmt: skip
        return stack()(x, None)[0]


class GatedNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.threshold = LoadBias(jnp.zeros(WIDTH))
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(gated(x, self.threshold[...]))


class Named(nn.Module):
    """No mark, and the name that a router gives its bias."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        bias = self.param("correction_bias", nn.initializers.zeros, (WIDTH,))
        return nn.Dense(WIDTH)(x) + bias[None]


def square(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def weighted(y: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    keep = t > 0
    return jnp.sum(jnp.where(keep, (y - t) ** 2, 0.0)), jnp.sum(keep.astype(jnp.float32)) / 7


LAYERS: dict[str, list[Any]] = {
    "linen": [LayerSpec(Gated), LayerSpec(Gated), LayerSpec(nn.Dense, WIDTH)],
    "scan": [LayerSpec(Stack), LayerSpec(Gated)],
    "nnx": [LayerSpec(GatedNNX), LayerSpec(GatedNNX)],
    "tied": [TiedLayerSpec("gate", Gated), LayerSpec(Gated), TiedLayerSpec("gate", Gated)],
    "beside": [LayerSpec(Named), LayerSpec(Gated)],
}


def batch() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shape = MICROBATCHES, 2 * ROWS, WIDTH
    x, t = rng.normal(size=shape), rng.normal(size=shape) + np.arange(MICROBATCHES)[:, None, None]
    return jnp.asarray(x, jnp.float32), jnp.asarray(t, jnp.float32)


def module_of(layers: Sequence[Any], num_stages: int, **given: Any) -> PipelineModule:
    return PipelineModule(layers, num_stages=num_stages, **{"loss_fn": square, **given})


def is_threshold(path: Any) -> bool:
    return path[-1].key == "threshold"


def wanted(module: PipelineModule, params: Any, optimizer: Any, frozen: str = "none") -> Any:
    """Parameters after a step on one device: optax moves all but the marked ones."""
    x, t = batch()

    def loss(params: Any) -> Any:
        outputs = [module.apply(params, each) for each in x]
        return sum(map(module.loss, outputs, t)) / len(x)

    grads = jax.grad(loss)(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    new = optax.apply_updates(params, updates)

    def one(path: Any, before: Any, after: Any, load: Any) -> Any:
        if frozen in jax.tree_util.keystr(path, simple=True, separator="/"):
            return before
        return before - RATE * jnp.sign(load) if is_threshold(path) else after

    return jax.tree.map_with_path(one, params, new, grads)


def stepped(
    module: PipelineModule,
    params: Any,
    optimizer: Any,
    data: int = 1,
    rate: float = RATE,
    **keys: Any,
) -> Any:
    x, t = batch()
    topology = ProcessTopology(["pipe", "data"], [module.num_stages, data])
    mesh = make_pipeline_mesh(topology, jax.devices()[: module.num_stages * data])
    settings = make_settings(**{"router_bias_update_rate": RATE, **keys})
    pipeline = Pipeline(module, optimizer, mesh, (x[0], t[0]), MICROBATCHES, settings)
    state, metrics = pipeline.step(pipeline.states.init_from(params), (x, t))
    return pipeline, state, metrics


@pytest.mark.parametrize(
    "kind", sweep(2, sorted(LAYERS, key=lambda kind: kind not in ("linen", "tied")))
)
def test_a_mark_moves_a_parameter_in_every_kind_of_layer(kind: str) -> None:
    module = module_of(LAYERS[kind], 2)
    params = module.init(jax.random.key(0), batch()[0][0])
    assert not any(isinstance(x, nn.meta.AxisMetadata) for x in jax.tree.leaves(params))
    pipeline, state, metrics = stepped(module, params, optax.sgd(0.1), data=2, zero_stage=1)
    new = pipeline.params_tree(state.params)
    expected = wanted(module, params, optax.sgd(0.1))
    assert_close(new, expected)
    moved = [x for path, x in jax.tree.leaves_with_path(new) if is_threshold(path)]
    assert moved
    assert all(x.any() for x in moved)
    assert "threshold" not in str(
        jax.tree.structure(pipeline.states.opt_state_tree(state.opt_state))
    )
    # A load is too small for any norm.
    without = module.replace(trainable=lambda path: not path.endswith("threshold"))
    norm = stepped(without, params, optax.sgd(0.1), data=2, router_bias_update_rate=0.0)[2][
        "grad_norm"
    ]
    assert float(norm) == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)


@pytest.mark.parametrize("frozen", sweep(1, ["0_Gated", "1_Gated"]))
def test_a_bias_that_one_stage_freezes_moves_on_the_others(frozen: str) -> None:
    layers = [LayerSpec(Gated), LayerSpec(Gated)]
    module = module_of(layers, 2, trainable=lambda p: p != f"layers/{frozen}/threshold")
    params = module.init(jax.random.key(0), batch()[0][0])
    pipeline, state, _ = stepped(module, params, optax.adam(0.1))
    expected = wanted(module, params, optax.adam(0.1), f"{frozen}/threshold")
    assert_close(pipeline.params_tree(state.params), expected)


@pytest.mark.parametrize(
    ("dtype", "keys"),
    sweep(
        1,
        [
            ("float16", {"loss_scaler": LossScaler(2.0**16), "gradient_clipping": 1e-3}),
            (None, {"grad_accum_dtype": "float16"}),
            (None, {"gradient_clipping": 1e-8}),
            ("bfloat16", {"loss_scaler": LossScaler.none(), "zero_stage": 1}),
        ],
        unpack=True,
    ),
)
def test_no_precision_scale_or_clipping_changes_a_load(dtype: Any, keys: Any) -> None:
    module = module_of(LAYERS["linen"], 2, compute_dtype=dtype)
    params = module.init(jax.random.key(0), batch()[0][0])
    pipeline, state, _ = stepped(module, params, optax.sgd(0.1), **keys)
    new = pipeline.params_tree(state.params)
    expected = wanted(module, params, optax.sgd(0.1))
    pairs = zip(jax.tree.leaves_with_path(new), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        if is_threshold(path):
            np.testing.assert_array_equal(x, y)


def test_three_calls_weigh_no_load() -> None:
    x, t = batch()
    config = {
        "train_micro_batch_size_per_gpu": 2 * ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "pipeline": {"router_bias_update_rate": RATE},
    }

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return Gated()(Gated()(x))

    def engine() -> Any:
        mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data"], [1, 1]), jax.devices()[:1])
        given: dict[str, Any] = {
            "config": config,
            "optimizer": optax.sgd(0.1),
            "mesh": mesh,
            "reporter": None,
        }
        given |= {"model": Model(), "loss_fn": weighted, "example_batch": (x[0], t[0])}
        return jaxpipe.initialize(**given)[0]

    whole, parts = engine(), engine()
    whole.train_batch(iter(zip(x, t, strict=True)))
    for inputs, labels in zip(x, t, strict=True):
        parts.backward(parts(inputs, labels))
        parts.step()
    assert_close(parts.module_state_dict(), whole.module_state_dict())


def test_an_average_has_the_biases() -> None:
    x, t = batch()
    module = module_of(LAYERS["linen"], 2)
    config = {
        "train_micro_batch_size_per_gpu": 2 * ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "pipeline": {"router_bias_update_rate": RATE},
        "ema": {"decay": 0.75, "warmup": False},
    }
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data"], [2, 1]), jax.devices()[:2])
    pipeline = jaxpipe.make_pipeline(module, optax.sgd(0.1), config, mesh, (x[0], t[0]))
    state = pipeline.init()
    average = pipeline.params_tree(state.params)
    for _ in range(2):
        state, _ = pipeline.step(state, (x, t))
        new = pipeline.params_tree(state.params)
        average = jax.tree.map(lambda a, p: 0.75 * a + 0.25 * p, average, new)
    found = pipeline.params_tree(pipeline.states.with_params(state, "ema").params)
    assert_close(found, average)
    assert found["layers"]["0_Gated"]["threshold"].any()


def test_a_narrow_mark_is_refused() -> None:
    class Narrow(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            bias = self.param("b", load_bias(nn.initializers.zeros), (WIDTH,), jnp.bfloat16)
            return x + bias.astype(x.dtype)[None]

    module = module_of([LayerSpec(Narrow)], 1)
    with pytest.raises(LayerError, match=r"'b' of layer 0_Narrow must be in float32 or wider"):
        module.trace(jnp.ones((2, WIDTH)))
