from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from flax import nnx
from jax.core import Tracer

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

KEY = jax.random.key(0)
IDS = np.array([[0, 2, 4], [1, 1, 3]])


class _Block(nn.Module):
    dim: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return x + nn.Dropout(0.5, deterministic=not train)(nn.gelu(nn.Dense(self.dim)(x)))


class _Embed(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(5, 4, name="token")(ids)
        return x + self.param("position", nn.initializers.normal(), (1, ids.shape[1], 4))


def _language_model(**kwargs: Any) -> PipelineModule:
    layers = [
        LayerSpec(nn.Embed, 5, 4),
        *[LayerSpec(_Block, 4) for _ in range(2)],
        LayerSpec(nn.Dense, 5),
    ]
    return PipelineModule(layers, num_stages=2, **kwargs)


@pytest.fixture(scope="module")
def language_params() -> Any:
    return _language_model().init(KEY, IDS)


def _by_hand(params: Any, ids: Any, train: bool, key: jax.Array) -> jax.Array:
    layers = params["layers"]
    x = nn.Embed(5, 4).apply({"params": layers["0_Embed"]}, ids)
    for i in (1, 2):
        keys = jax.random.fold_in(key, i)
        rngs = {"params": jax.random.fold_in(keys, 0), "dropout": jax.random.fold_in(keys, 1)}
        x = _Block(4).apply({"params": layers[f"{i}__Block"]}, x, train, rngs=rngs)
    return nn.Dense(5).apply({"params": layers["3_Dense"]}, x)  # pyright: ignore[reportReturnType]


def _loss_and_gradients(apply: Callable[[Any], jax.Array], params: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(apply(p) ** 2)))(params)


@pytest.mark.parametrize("train", sweep(1, [True, False]))
def test_the_sequential_model_is_the_same_as_flax_by_hand(
    train: bool, language_params: Any
) -> None:
    model, params = _language_model(), language_params
    key = jax.random.key(5)
    ours = _loss_and_gradients(lambda p: model.apply(p, IDS, train=train, key=key), params)
    theirs = _loss_and_gradients(lambda p: _by_hand(p, IDS, train, key), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), ours, theirs)


def test_dropout_is_keyed_by_the_key_and_the_place_of_the_layer() -> None:
    model = PipelineModule([nn.Dropout(0.5), lambda x: x, nn.Dropout(0.5)], num_stages=1)
    x = np.ones((8, 8), np.float32)
    calls = [model.run_layers([i], [{}], train=True) for i in (0, 2)]
    first, third = (np.asarray(call(x, KEY, {}, [{}])[0]) for call in calls)
    shifted = model.run_layers([0], [{}], train=True, offset=jnp.int32(2))(x, KEY, {}, [{}])[0]
    assert not np.array_equal(first, third)
    np.testing.assert_array_equal(shifted, third)
    np.testing.assert_array_equal(model.apply({}, x, train=True, key=KEY), first * third)
    assert not np.array_equal(model.apply({}, x, train=True, key=jax.random.key(1)), first * third)


@pytest.mark.parametrize("interval", sweep(1, [3, 1]))
def test_recompute_changes_no_number(interval: int, language_params: Any) -> None:
    wrapped = []

    def remat(function: Callable[..., Any]) -> Callable[..., Any]:
        wrapped.append(function)
        return jax.checkpoint(function)

    model = _language_model()
    recomputing = model.replace(
        activation_checkpoint_interval=interval, activation_checkpoint_func=remat
    )
    params = language_params
    grads = [
        _loss_and_gradients(lambda p, m=m: m.apply(p, IDS, train=True, key=KEY), params)
        for m in (model, recomputing)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *grads)
    assert len(wrapped) == -(-4 // interval)
    jax.eval_shape(recomputing.apply, params, IDS)
    assert len(wrapped) == -(-4 // interval)


def _tied(attr: Any = None) -> PipelineModule:
    def attend(module: nn.Module, x: jax.Array) -> jax.Array:
        return x @ module.variables["params"]["token"]["embedding"].T

    tie = {"tied_weight_attr": attr}
    return PipelineModule(
        [
            TiedLayerSpec("embed", _Embed, **tie),
            _Block(4),
            TiedLayerSpec("embed", _Embed, forward_fn=attend, **tie),
        ],
        num_stages=1,
    )


@pytest.mark.parametrize("attr", [None, "token.embedding"])
def test_the_gradient_of_a_tied_parameter_is_the_sum_of_its_uses(attr: Any) -> None:
    model = _tied(attr)
    params = model.init(KEY, IDS)
    table = params["tied"]["embed"]["token"]["embedding"]

    def by_hand(uses: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = params["tied"]["embed"] if attr is None else params["layers"]["0__Embed"]
        x = uses[0][IDS] + own["position"]
        x = _Block(4).apply({"params": params["layers"]["1__Block"]}, x)
        return jnp.sum((x @ uses[1].T) ** 2)

    value, (first, second) = jax.jit(jax.value_and_grad(by_hand))((table, table))
    ours, grads = _loss_and_gradients(lambda p: model.apply(p, IDS), params)
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    np.testing.assert_allclose(
        grads["tied"]["embed"]["token"]["embedding"], first + second, rtol=1e-5, atol=1e-6
    )
    assert float(abs(first).max()) > 0
    assert float(abs(second).max()) > 0


def test_a_tied_forward_fn_gets_arguments_by_name() -> None:
    def attend(module: nn.Embed, x: jax.Array, scale: jax.Array, train: bool) -> jax.Array:
        return module.attend(x) * scale if train else module.attend(x)

    spec = TiedLayerSpec("e", nn.Embed, 5, 4, forward_fn=attend)
    model = PipelineModule([TiedLayerSpec("e", nn.Embed, 5, 4), spec], num_stages=1)
    side = {"scale": np.float32(3)}
    params = model.init(KEY, IDS, side=side)
    calm = model.apply(params, IDS, side=side)
    np.testing.assert_allclose(model.apply(params, IDS, side=side, train=True), 3 * calm, rtol=1e-6)


def test_masks_ride_along_without_gradient() -> None:
    def start(inputs: Any) -> Any:
        ids, mask = inputs
        return {"x": jax.nn.one_hot(ids, 4), "mask": mask, "ids": ids}

    def masked(tree: Any) -> Any:
        return {**tree, "x": jnp.where(tree["mask"][..., None], tree["x"], 0)}

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, tree: Any) -> Any:
            return {**tree, "x": nn.Dense(4)(tree["x"])}

    model = PipelineModule([start, Inner(), masked, lambda tree: tree["x"].sum()], num_stages=2)
    inputs = (IDS, np.array([[True, False, True], [False, False, True]]))
    params = model.init(KEY, inputs)
    grad = jax.jit(jax.grad(lambda p: model.apply(p, inputs)))(params)["layers"]["1_Inner"][
        "Dense_0"
    ]["kernel"]
    wanted = np.zeros((4, 4), np.float32)
    for token in IDS[inputs[1]]:
        wanted[token if token < 4 else slice(0, 0)] += 1
    np.testing.assert_allclose(grad, wanted)


def test_it_runs_under_jit_and_leaves_no_trace_of_itself() -> None:
    model = PipelineModule([LayerSpec(nn.Embed, 5, 4), LayerSpec(nn.Dense, 5)], num_stages=1)
    params = model.init(KEY, IDS)
    apply = jax.jit(lambda p, ids: model.apply(p, ids))
    np.testing.assert_allclose(apply(params, IDS), model.apply(params, IDS), rtol=1e-5, atol=1e-6)
    shapes = jax.eval_shape(lambda key: model.init(key, IDS), KEY)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)


def test_a_run_calls_each_layer_once() -> None:
    calls = []

    def count(x: jax.Array) -> jax.Array:
        calls.append(x.shape)
        return x

    model = PipelineModule([nn.Dense(3), count], num_stages=1)
    params = model.init(KEY, np.ones((2, 3), np.float32))
    calls.clear()
    for length in (2, 3, 2):
        model.apply(params, np.ones((length, 3), np.float32))
    assert calls == [(2, 3), (3, 3), (2, 3)]


def test_missing_parameters_are_named() -> None:
    model = PipelineModule(
        [nn.Dense(3), nn.Dense(3), TiedLayerSpec("k", nn.LayerNorm)], num_stages=1
    )
    x = np.ones((2, 3), np.float32)
    params = model.init(KEY, x)
    del params["layers"]["1_Dense"]["bias"], params["tied"]
    with pytest.raises(
        LayerError,
        match="got none for layers/1_Dense/bias, tied/k/scale, tied/k/bias|tied/k/bias, "
        "tied/k/scale",
    ):
        model.apply(params, x)
    with pytest.raises(LayerError, match=r"got none for layers/0_Dense/.*Pass what init or"):
        model.apply({}, x)
    with pytest.raises(LayerError, match="got none for layers/0_Dense/"):
        model.apply([1, 2], x)


def test_parameters_on_the_host_serve_as_well() -> None:
    model = PipelineModule(
        [nn.Dense(3, param_dtype=jnp.bfloat16), LayerSpec(nnx.Linear, 3, 2)], num_stages=1
    )
    x = np.ones((2, 3), np.float32)
    params = model.init(KEY, x)
    np.testing.assert_array_equal(
        model.apply(jax.tree.map(np.asarray, params), x), model.apply(params, x)
    )


def test_another_fault_is_left_as_it_is() -> None:
    def layer(x: jax.Array) -> jax.Array:
        if not isinstance(x, Tracer):
            raise OSError("disk gone")
        return x

    with pytest.raises(OSError, match="disk gone"):
        PipelineModule([layer], num_stages=1).apply({}, np.ones(2, np.float32))


def test_a_loss_of_numpy_labels() -> None:
    labels = np.array([1.0, -1.0, 2.0], np.float32)

    def loss(outputs: Any, labels: Any) -> Any:
        counts = labels > 0
        return (outputs * labels * counts).sum(), counts.sum()

    total, weight, _ = PipelineModule([nn.Dense(1)], num_stages=1, loss_fn=loss).loss_terms(
        labels, labels
    )
    assert (float(total), float(weight)) == (5.0, 2.0)
