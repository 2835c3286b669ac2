"""Layers without a dtype of their own whose loops and branches want one dtype.

The model computes in another.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _tolerances import BFLOAT16, tree_error
from flax import nnx

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule, TiedLayerSpec
from jaxpipe.topology import make_pipeline_mesh

DIM = 4
X = np.random.default_rng(0).normal(size=(2, 3, DIM)).astype(np.float32)


class _Step(nn.Module):
    @nn.compact
    def __call__(self, carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = nn.tanh(nn.Dense(DIM)(carry) + x)
        return carry, carry


class _NNScan(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = nn.scan(
            _Step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1
        )
        return scan()(x[:, 0], x)[1]


class _LaxScan(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (DIM, DIM))
        return jax.lax.scan(
            lambda c, row: (jnp.tanh(c @ kernel + row),) * 2, x[:, 0], x.swapaxes(0, 1)
        )[1].swapaxes(0, 1)


class _Cond(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (DIM, DIM))
        return jax.lax.cond(x.sum() > -100, lambda x: x @ kernel, lambda x: x, x)


class _NNXLoop(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.linear.kernel[...]
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ kernel), x)


LAYERS = {
    "nn.scan": [LayerSpec(_NNScan)],
    "lax.scan": [LayerSpec(_LaxScan)],
    "lax.cond": [LayerSpec(_Cond)],
    "fori_loop in NNX": [LayerSpec(_NNXLoop)],
    "tied": [TiedLayerSpec("k", _LaxScan), TiedLayerSpec("k", _LaxScan)],
}


def _module(layers: Any, dtype: str | None, **kwargs: Any) -> PipelineModule:
    loss_fn = lambda y, t: jnp.mean((y - t) ** 2)  # noqa: E731
    return PipelineModule(layers, loss_fn=loss_fn, compute_dtype=dtype, auto_cast=True, **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_loops_and_branches_see_one_dtype(layers: Any, dtype: str) -> None:
    module = _module(layers, dtype, num_stages=1)
    trace = module.trace(X)
    assert {b.dtype.name for b in trace.boundaries} == {dtype}
    assert {x.dtype.name for x in jax.tree.leaves(trace.params)} == {"float32"}
    made, _ = jax.eval_shape(
        lambda key: module.init_layer(len(layers) - 1, trace, key), jax.random.key(0)
    )
    assert jax.tree.structure(made) == jax.tree.structure(trace.params[-1])


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_wide_inputs_stay_wide_in_loops_and_branches(layers: Any) -> None:
    trace = _module(layers, "bfloat16", num_stages=1).replace(auto_cast=False).trace(X)
    assert {b.dtype.name for b in trace.boundaries} == {"float32"}


@pytest.mark.parametrize(
    ("layers", "auto_cast", "wide"),
    [
        ([nn.Dense(DIM), jnp.tanh, nn.Dense(DIM)], False, "0_Dense and 1 more are"),
        ([jnp.tanh, nn.Dense(DIM, dtype=jnp.bfloat16), nn.Dense(DIM)], False, None),
        ([nn.Dense(DIM), nn.Dense(DIM)], True, None),
        ([nn.Dense(DIM), nn.Dense(DIM, dtype=jnp.float32)], True, None),
    ],
)
def test_layers_that_compute_wider_than_their_parameters_are_named_once(
    layers: Any, auto_cast: bool, wide: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    module = PipelineModule(layers, 1, compute_dtype="bfloat16", auto_cast=auto_cast)
    for _ in range(2):
        module.trace(X)
    found = [
        record.getMessage() for record in caplog.records if "computed in" in record.getMessage()
    ]
    assert [line.partition(" computed in")[0] for line in found] == [wide] * (wide is not None)


@pytest.mark.slow
def test_a_pipeline_of_loops_in_bfloat16() -> None:
    layers = [*LAYERS["nn.scan"], *LAYERS["lax.cond"]]
    topology = PipeDataParallelTopology(2, 1)
    module = _module(layers, "bfloat16", topology=topology)
    pipeline = Pipeline(module, optax.identity(), make_pipeline_mesh(topology), (X, X), 1)
    state = pipeline.init()
    metrics, storage, _ = pipeline.gradients(state, (X[None], X[None], {}))

    plain = _module(layers, None, num_stages=1)
    params = pipeline.params_tree(state.params)
    loss, grads = jax.jit(
        jax.value_and_grad(lambda p: plain.loss(plain.apply(p, X, train=True), X))
    )(params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=BFLOAT16)
    assert tree_error(pipeline.params_tree(storage), jax.device_get(grads))[0] <= BFLOAT16
