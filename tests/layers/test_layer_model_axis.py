"""Layers that use the mesh axis `model`, on one device."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from jaxpipe.errors import LayerError
from jaxpipe.layers import with_axes

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class _Columns(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return x @ self.param("kernel", init, (x.shape[-1], 8 // jax.lax.axis_size("model")))


class _NNXRows(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.size = 8 // jax.lax.axis_size("model")
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
        self.linear = nnx.Linear(self.size, 4, kernel_init=init, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(self.linear(x[:, : self.size]), "model")


def _exchange(x: jax.Array) -> jax.Array:
    there = jax.lax.all_to_all(x, "model", 1, 0, tiled=True)
    return jax.lax.all_to_all(there, "model", 0, 1, tiled=True) + jax.lax.axis_index("model")


def _module(*layers: Any) -> PipelineModule:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    return PipelineModule(
        layers, topology=topology, loss_fn=lambda y, t: jax.lax.pmean(jnp.mean((y - t) ** 2), "model")
    )


def test_parameters_are_whole_and_as_those_of_an_undivided_layer() -> None:
    model = _module(LayerSpec(_Columns), _exchange, LayerSpec(_NNXRows))
    params = model.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, params["layers"]) == {
        "0__Columns": {"kernel": (4, 8)},
        "2__NNXRows": {"linear": {"kernel": (8, 4)}},
    }
    kernels = jax.tree.leaves(params)
    np.testing.assert_allclose(model.apply(params, X), X @ kernels[0] @ kernels[1], rtol=1e-5)
    grads = jax.grad(lambda params: model.loss(model.apply(params, X), X))(params)
    wanted = jax.grad(lambda ks: jnp.mean((X @ ks[0] @ ks[1] - X) ** 2))(kernels)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), jax.tree.leaves(grads), wanted)


def test_a_place_holds_a_share() -> None:
    model = _module(LayerSpec(_Columns), _exchange, LayerSpec(_NNXRows))
    place = with_axes({"model": 2}, lambda: model.trace(X))
    assert [jax.tree.map(jnp.shape, params) for params in place.params] == [
        {"kernel": (4, 4)},
        {},
        {"linear": {"kernel": (4, 4)}},
    ]
    assert place.param_dims == ({("kernel",): 1}, {}, {("linear", "kernel"): 0})
    assert (place.num_model, model.trace(X).num_model) == (2, 1)


def test_an_axis_that_is_there_stays() -> None:
    model = _module(LayerSpec(_Columns))
    params = model.init(jax.random.key(0), X)
    shares = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2, axis=1)), params)
    found = jax.vmap(lambda params: model.apply(params, X), axis_name="model")(shares)
    np.testing.assert_allclose(jnp.concatenate([*found], axis=1), model.apply(params, X), rtol=1e-5)


@pytest.mark.parametrize("layer", [_Columns(), LayerSpec(_NNXRows), lambda x: jax.lax.psum(x, "model")])
def test_the_topology_must_have_the_axis(layer: Any) -> None:
    model = PipelineModule([layer], num_stages=1)
    with pytest.raises(
        LayerError, match=r"layer 0_\S+ must run on a mesh with the axis 'model'.*PipeModelDataParallel"
    ):
        model.init(jax.random.key(0), X)
    with pytest.raises(
        LayerError, match=r"layer 0_lambda must use .*'data', .* but got: .*unbound axis name: other. Name 'data' to"
    ):
        PipelineModule([lambda x: jax.lax.psum(x, "other")], num_stages=1).init(jax.random.key(0), X)


def test_metadata_alone_does_not_make_a_layer_parallel() -> None:
    init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    trace = PipelineModule([nn.Dense(8, kernel_init=init)], num_stages=1).trace(X)
    assert trace.num_model == 0
    assert trace.param_dims == ({},)
