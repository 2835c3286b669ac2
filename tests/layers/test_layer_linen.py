from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
KEY = jax.random.key(0)


class _Positional(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None, train: bool) -> jax.Array:
        x = nn.Dense(3)(x)
        if train:
            x = x + 1
        return x if mask is None else x * mask


class _Optional(nn.Module):
    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, train: bool = False
    ) -> jax.Array:
        x = nn.Dense(3)(x)
        x = x + 1 if train else x
        return x if mask is None else x * mask


class _Setup(nn.Module):
    def setup(self) -> None:
        self.inner = [nn.Dense(5), nn.Dense(3)]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.inner:
            x = nn.tanh(layer(x))
        return x


class _NoCall(nn.Module):
    def other(self, x: jax.Array) -> jax.Array:
        return 2 * x


class _Sowing(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("intermediates", "x", x)
        return nn.Dense(3)(x)


def _model(layer: Any) -> tuple[PipelineModule, Any]:
    model = PipelineModule([layer], num_stages=1)
    return model, model.init(KEY, X)


def test_a_module_with_setup_has_linens_own_parameter_names() -> None:
    model, params = _model(LayerSpec(_Setup))
    inner = params["layers"]["0__Setup"]
    assert jax.tree.map(jnp.shape, inner) == jax.tree.map(
        jnp.shape, _Setup().init(KEY, X)["params"]
    )
    np.testing.assert_array_equal(model.apply(params, X), _Setup().apply({"params": inner}, X))


def test_arguments_are_passed_by_name_wherever_they_stand() -> None:
    model = PipelineModule([LayerSpec(_Positional)], num_stages=1)
    mask = np.ones((1, 3), np.float32)
    params = model.init(KEY, X, side={"mask": mask})
    calm = model.apply(params, X, side={"mask": mask})
    np.testing.assert_array_equal(model.apply(params, X, side={"mask": mask}, train=True), calm + 1)


def test_train_stays_static_under_linens_remat() -> None:
    plain, params = _model(LayerSpec(_Optional))
    remat = PipelineModule([LayerSpec(nn.remat(_Optional, static_argnums=(3,)))], num_stages=1)
    renamed = {"layers": {remat.layers[0].name: params["layers"]["0__Optional"]}}
    grads = [
        jax.grad(lambda p, m=m: m.apply(p, X, train=True).sum())(p)
        for m, p in [(plain, params), (remat, renamed)]
    ]
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(grads[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_a_module_was_built_with_is_not_passed_again() -> None:
    model, params = _model(LayerSpec(nn.Dropout, 0.5, deterministic=True))
    np.testing.assert_array_equal(model.apply(params, X, train=True, key=KEY), X)


def test_dropout_follows_train() -> None:
    model, params = _model(nn.Dropout(0.5))
    np.testing.assert_array_equal(model.apply(params, X, key=KEY), X)
    dropped = np.asarray(model.apply(params, X, train=True, key=KEY))
    assert set(np.unique(dropped == 0)) == {False, True}
    np.testing.assert_allclose(dropped[dropped != 0], 2 * X[dropped != 0], rtol=1e-6)


def test_intermediates_are_not_kept() -> None:
    model, params = _model(_Sowing())
    assert set(params["layers"]["0__Sowing"]) == {"Dense_0"}
    assert model.apply(params, X, train=True).shape == (4, 3)


def test_partition_metadata_is_unboxed() -> None:
    init = nn.with_partitioning(nn.initializers.ones, ("model", None))
    model, params = _model(nn.Dense(2, kernel_init=init))
    np.testing.assert_array_equal(params["layers"]["0_Dense"]["kernel"], np.ones((3, 2)))
    np.testing.assert_allclose(
        model.apply(params, X), np.repeat(X.sum(-1, keepdims=True), 2, -1), rtol=1e-5
    )


def test_parameters_keep_their_own_dtype() -> None:
    _, params = _model(nn.Dense(2, param_dtype=jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}


class _Norm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        self.sow("losses", "size", jnp.mean(x**2))
        self.sow("metrics", "top", jnp.max(x))
        self.sow("intermediates", "all", x)
        return nn.BatchNorm(use_running_average=not train)(x)


def test_batch_statistics_and_reports() -> None:
    model = PipelineModule([_Norm(), jnp.tanh, _Norm()], num_stages=1)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    params, held = model.init(KEY, x), model.init_collections(KEY, x)
    assert list(held) == ["0__Norm", "2__Norm"]
    with pytest.raises(
        LayerError, match=r"collections must hold .* none for 0__Norm, 2__Norm. Use call\(params"
    ):
        model.apply(params, x)
    _, trained, aux = model.call(params, held, x, train=True)
    stats = trained["0__Norm"]["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], 0.01 * x.mean(0), rtol=1e-5)
    assert sorted(aux["losses"]) == ["0__Norm/size", "2__Norm/size"]
    np.testing.assert_allclose(aux["losses"]["0__Norm/size"], np.mean(x**2), rtol=1e-6)
    np.testing.assert_allclose(aux["metrics"]["0__Norm/top"], 11.0)
    _, same, aux = model.call(params, trained, x)
    assert aux == {"losses": {}, "metrics": {}}
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(trained), strict=True)
    )


def test_a_forward_fn_replaces_a_call() -> None:
    spec = TiedLayerSpec("k", _NoCall, forward_fn=lambda module, x: module.other(x))
    np.testing.assert_array_equal(PipelineModule([spec], num_stages=1).apply({}, X), 2 * X)


def test_a_random_layer_without_a_key_fails_in_training() -> None:
    model, params = _model(nn.Dropout(0.5))
    with pytest.raises(Exception, match="Dropout_0 needs PRNG|needs PRNG for"):
        model.apply(params, X, train=True)
