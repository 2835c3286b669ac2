from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
KEY = jax.random.key(0)


class _Shared(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.zagain = self.layers[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return self.zagain(x)


class _NoRngs(nnx.Module):
    def __init__(self, size: int) -> None:
        self.scale = nnx.Param(jnp.full((1, size), 2.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...]


class _Passing(nnx.Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class _TwoDropouts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.a(x), self.b(x)


class _Norm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class _PlainArray(nnx.Module):
    def __init__(self) -> None:
        self.table = jnp.ones((1, 3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.table


class _NumpyArray(nnx.Module):
    def __init__(self) -> None:
        self.table = np.ones((1, 3), np.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.table


class _NoCall(nnx.Module):
    pass


class _Remat(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.tanh(self.linear(x))


def _model(*layers: Any) -> tuple[PipelineModule, Any]:
    model = PipelineModule(layers, num_stages=1)
    return model, model.init(KEY, X)


def test_a_spec_is_built_with_keys_of_the_layers_own() -> None:
    model, params = _model(LayerSpec(nnx.Linear, 3, 3), LayerSpec(nnx.Linear, 3, 3))
    kernels = [params["layers"][f"{i}_Linear"]["kernel"] for i in range(2)]
    by_hand = nnx.Linear(3, 3, rngs=nnx.Rngs(jax.random.fold_in(KEY, 1)))
    assert not np.array_equal(*kernels)
    np.testing.assert_array_equal(kernels[1], by_hand.kernel[...])
    np.testing.assert_allclose(model.apply(params, X), X @ kernels[0] @ kernels[1], rtol=1e-5, atol=1e-6)


def test_lists_and_shared_submodules() -> None:
    model, params = _model(LayerSpec(_Shared))
    tree = params["layers"]["0__Shared"]
    assert jax.tree.map(jnp.shape, tree) == {
        "layers": {str(i): {"kernel": (3, 3), "bias": (3,)} for i in range(2)},
    }
    by_hand = _Shared(nnx.Rngs(jax.random.fold_in(KEY, 0)))
    np.testing.assert_allclose(model.apply(params, X), by_hand(X), rtol=1e-5, atol=1e-6)


def test_a_constructor_need_not_take_rngs() -> None:
    model, params = _model(LayerSpec(_NoRngs, 3))
    np.testing.assert_array_equal(model.apply(params, X), 2 * X)


def test_a_constructor_may_pass_rngs_on() -> None:
    _, params = _model(LayerSpec(_Passing, 3, 2))
    assert params["layers"]["0__Passing"]["kernel"].shape == (3, 2)


def test_dropout_follows_train_and_the_key() -> None:
    model, params = _model(LayerSpec(_TwoDropouts))
    assert params == {}
    for out in model.apply(params, X, key=KEY):
        np.testing.assert_array_equal(out, X)
    a, b = model.apply(params, X, train=True, key=KEY)
    again, _ = model.apply(params, X, train=True, key=KEY)
    other, _ = model.apply(params, X, train=True, key=jax.random.key(1))
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, other)
    np.testing.assert_array_equal(a, again)


def test_a_call_that_names_rngs_gets_nnx_streams() -> None:
    model, params = _model(LayerSpec(nnx.Dropout, 0.5))
    dropped = np.asarray(model.apply(params, X, train=True, key=KEY))
    assert set(np.unique(dropped == 0)) == {False, True}
    np.testing.assert_array_equal(model.apply(params, X), X)


def test_training_without_a_key_is_refused_where_streams_wait_for_one() -> None:
    model, params = _model(LayerSpec(_TwoDropouts))
    with pytest.raises(LayerError, match=r"layer _TwoDropouts must get a key in training.*key=None. Pass apply\("):
        model.apply(params, X, train=True)


def test_attention_with_dropout() -> None:
    attention = LayerSpec(nnx.MultiHeadAttention, 1, 3, dropout_rate=0.5, decode=False)
    model = PipelineModule([attention], num_stages=1)
    x = np.broadcast_to(X, (2, 4, 3))
    params = model.init(KEY, x)
    calm = model.apply(params, x)
    assert not np.array_equal(model.apply(params, x, train=True, key=KEY), calm)


def test_a_rematerialised_call() -> None:
    model, params = _model(LayerSpec(_Remat))
    tree = params["layers"]["0__Remat"]["linear"]
    grad = jax.grad(lambda p: model.apply(p, X, train=True).sum())(params)["layers"]["0__Remat"]["linear"]
    wanted = jax.grad(lambda p: jnp.tanh(X @ p["kernel"] + p["bias"][None]).sum())(tree)
    np.testing.assert_allclose(grad["kernel"], wanted["kernel"], rtol=1e-5, atol=1e-6)


def test_a_forward_fn_gets_the_module_itself() -> None:
    ids = np.array([[0, 2], [4, 1]])
    model = PipelineModule(
        [
            TiedLayerSpec("embed", nnx.Embed, 5, 3),
            TiedLayerSpec("embed", nnx.Embed, 5, 3, forward_fn=lambda module, x: x @ module.embedding[...].T),
        ],
        num_stages=1,
    )
    params = model.init(KEY, ids)
    table = params["tied"]["embed"]["embedding"]
    np.testing.assert_allclose(model.apply(params, ids), table[ids] @ table.T, rtol=1e-5, atol=1e-6)


def test_batch_statistics_change_in_training_alone() -> None:
    model = PipelineModule([LayerSpec(_Norm)], num_stages=1)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    held = model.init_collections(KEY, x)
    params = model.init(KEY, x)
    _, trained, _ = model.call(params, held, x, train=True, key=KEY)
    outputs, same, _ = model.call(params, trained, x)
    assert jax.tree.structure(held) == jax.tree.structure(trained)
    (mean,) = (leaf for path, leaf in jax.tree.leaves_with_path(trained) if "mean" in jax.tree_util.keystr(path))
    np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-5)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(trained), strict=True))
    assert not np.array_equal(outputs, model.call(params, held, x)[0])


def test_a_plain_array_is_refused() -> None:
    with pytest.raises(LayerError, match="nnx.Variable objects, but got a plain array as _PlainArray.table. Make it"):
        PipelineModule([LayerSpec(_PlainArray)], num_stages=1)


class _OddParam(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.inner = nnx.List([nnx.Param(value)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@pytest.mark.parametrize(
    ("value", "got"), [("abc", "a str: 'abc'"), ([1.0], "a list"), ({"a": X}, "a dict"), (None, "a None")]
)
def test_a_parameter_that_is_no_array_is_refused(value: Any, got: str) -> None:
    with pytest.raises(LayerError, match=rf"parameter 'inner.0' of layer _OddParam must be one array, but got {got}"):
        PipelineModule([LayerSpec(_OddParam, value)], num_stages=1)


def test_a_numpy_array_is_kept_as_it_is() -> None:
    model = PipelineModule([LayerSpec(_NumpyArray)], num_stages=1)
    x = np.ones((2, 3), np.float32)
    held = model.init_collections(KEY, x)
    assert len(jax.tree.leaves(held)) == 1
    outputs, same, _ = model.call(model.init(KEY, x), held, x, train=True)
    assert outputs.shape[0] == 2
    assert jax.tree.structure(same) == jax.tree.structure(held)


def test_rngs_of_the_users_own_are_refused() -> None:
    with pytest.raises(LayerError, match=r"LayerSpec\(Linear, ...\) must leave rngs.*got rngs=Rngs. Leave it out"):
        PipelineModule([LayerSpec(nnx.Linear, 3, 3, rngs=nnx.Rngs(0))], num_stages=1)


def test_built_modules_among_the_arguments_are_refused() -> None:
    built = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match=r"LayerSpec\(Sequential, ...\).*got a Linear among its arguments. Build it"):
        PipelineModule([LayerSpec(nnx.Sequential, built)], num_stages=1)


def test_a_module_without_a_call_is_refused() -> None:
    with pytest.raises(LayerError, match=r"method __call__\(self, inputs\), but got _NoCall.*Define it"):
        PipelineModule([LayerSpec(_NoCall)], num_stages=1)
