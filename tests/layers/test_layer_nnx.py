from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused
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
    np.testing.assert_allclose(
        model.apply(params, X), X @ kernels[0] @ kernels[1], rtol=1e-5, atol=1e-6
    )


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
    with pytest.raises(
        LayerError, match=r"layer _TwoDropouts must get a key in training.*key=None. Pass apply\("
    ):
        model.apply(params, X, train=True)


@pytest.mark.slow
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
    grad = jax.grad(lambda p: model.apply(p, X, train=True).sum())(params)["layers"]["0__Remat"][
        "linear"
    ]
    wanted = jax.grad(lambda p: jnp.tanh(X @ p["kernel"] + p["bias"][None]).sum())(tree)
    np.testing.assert_allclose(grad["kernel"], wanted["kernel"], rtol=1e-5, atol=1e-6)


def test_a_forward_fn_gets_the_module_itself() -> None:
    ids = np.array([[0, 2], [4, 1]])
    model = PipelineModule(
        [
            TiedLayerSpec("embed", nnx.Embed, 5, 3),
            TiedLayerSpec(
                "embed", nnx.Embed, 5, 3, forward_fn=lambda module, x: x @ module.embedding[...].T
            ),
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
    (mean,) = (
        leaf
        for path, leaf in jax.tree.leaves_with_path(trained)
        if "mean" in jax.tree_util.keystr(path)
    )
    np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-5)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(trained), strict=True)
    )
    assert not np.array_equal(outputs, model.call(params, held, x)[0])


class _ArrayInside(nnx.Module):
    def __init__(self, hold: Callable[[jax.Array], Any]) -> None:
        self.inner = nnx.List([nnx.data(hold(jnp.ones((1, 3))))])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class _NumpyInside(nnx.Module):
    def __init__(self) -> None:
        self.tables = nnx.data({"a": [np.full((1, 3), 2.0, np.float32)]})

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.tables["a"][0]


def test_numpy_arrays_in_containers_are_kept_as_they_are() -> None:
    model = PipelineModule([LayerSpec(_NumpyInside)], num_stages=1)
    held = model.init_collections(KEY, X)
    outputs, same, _ = model.call(model.init(KEY, X), held, X, train=True)
    np.testing.assert_array_equal(outputs, 2 * X)
    assert jax.tree.structure(same) == jax.tree.structure(held)


class _OddVariable(nnx.Module):
    def __init__(self) -> None:
        self.tables = nnx.BatchStat({"a": jnp.ones(3)})

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class _Base(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def run(self, x: jax.Array) -> jax.Array:
        return self.norm(nnx.tanh(self.linear(x)))

    def clip(self) -> None:
        self.linear.kernel[...] = jnp.clip(self.linear.kernel[...], -0.1, 0.1)


class _Clips(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.clip()
        return self.run(x)


class _ClipsInTraining(_Base):
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if train:
            self.clip()
        return self.run(x)


class _ClipsInJit(_Base):
    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        self.clip()
        return self.run(x)


class _Updates(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        nnx.update(self.linear, jax.tree.map(lambda x: 2 * x, nnx.state(self.linear)))
        return self.run(x)


class _Replaces(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.linear.kernel = nnx.Param(2 * self.linear.kernel[...])
        return self.run(x)


class _MakesLater(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.later = nnx.Param(jnp.ones((1, 3)))
        return self.run(x) * self.later[...]


class _NormsWeights(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.WeightNorm(nnx.Linear(3, 3, rngs=rngs), use_scale=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class _RunsIn(_Base):
    def __init__(self, around: Callable[..., Any], rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.around = around

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.around(lambda module, x: module.run(x))(self, x)


class _WritesTheSame(_Base):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.linear.kernel[...] = self.linear.kernel[...]
        return self.run(x)


class _ScansAlongColumns(nnx.Module):
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=2)(nnx.vmap(_Base, in_axes=0, out_axes=self.axes))
        self.layers = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, module: _Base) -> jax.Array:
            return module.run(x)

        return nnx.scan(step, in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.parametrize(
    "spec",
    [
        LayerSpec(_RunsIn, nnx.jit),
        LayerSpec(_RunsIn, nnx.remat),
        LayerSpec(_WritesTheSame),
        LayerSpec(_ScansAlongColumns),
    ],
)
def test_transformations_that_hand_back_parameters_write_none(spec: LayerSpec) -> None:
    PipelineModule([spec], num_stages=1).trace(X)


class _OwnKind(nnx.Variable[Any]):
    pass


class _Remembers(nnx.Module):
    def __init__(self, kind: Any, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.seen = kind(jnp.zeros((1, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x) + self.seen[...]
        self.seen[...] = 0.5 * self.seen[...] + x.mean(0, keepdims=True)
        return y


@pytest.mark.parametrize(
    "kind", [nnx.Variable, nnx.Cache, nnx.Intermediate, nnx.Perturbation, _OwnKind]
)
def test_variables_that_are_no_parameters_are_kept_from_call_to_call(kind: Any) -> None:
    model = PipelineModule([LayerSpec(_Remembers, kind)], num_stages=1)
    params, held = model.init(KEY, X), model.init_collections(KEY, X)
    by_hand = _Remembers(kind, nnx.Rngs(jax.random.fold_in(KEY, 0)))
    for step in range(3):
        outputs, held, _ = model.call(params, held, X + step, train=True, key=KEY)
        np.testing.assert_allclose(outputs, by_hand(X + step), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(held["0__Remembers"]["state"]["seen"], by_hand.seen[...], rtol=1e-6)


class _OddParam(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.inner = nnx.List([nnx.Param(value)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_a_numpy_array_is_kept_as_it_is() -> None:
    model = PipelineModule([LayerSpec(_NumpyArray)], num_stages=1)
    x = np.ones((2, 3), np.float32)
    held = model.init_collections(KEY, x)
    assert len(jax.tree.leaves(held)) == 1
    outputs, same, _ = model.call(model.init(KEY, x), held, x, train=True)
    assert outputs.shape[0] == 2
    assert jax.tree.structure(same) == jax.tree.structure(held)


SPECS: list[tuple[str, LayerSpec]] = [
    (
        r"nnx\.Variable objects, but got a plain array as _PlainArray\.table\. Make it",
        LayerSpec(_PlainArray),
    ),
    *(
        (rf"got a plain array as _ArrayInside\.{path}\. Make it", LayerSpec(_ArrayInside, hold))
        for hold, path in (
            (lambda x: {"a": x}, "inner.0.a"),
            (lambda x: [x], "inner.0.0"),
            (lambda x: {"a": ({"b": x},)}, "inner.0.a.0.b"),
            (lambda x: nnx.Dict(a=x), "inner.0.a"),
        )
    ),
    (
        "variable 'tables' of layer _OddVariable must be one array, but got a dict",
        LayerSpec(_OddVariable),
    ),
    *(
        (
            rf"parameter 'inner\.0' of layer _OddParam must be one array, but got {got}",
            LayerSpec(_OddParam, value),
        )
        for value, got in (
            ("abc", "a str: 'abc'"),
            ([1.0], "a list"),
            ({"a": X}, "a dict"),
            (None, "a None"),
        )
    ),
    (
        r"LayerSpec\(Linear, \.\.\.\) must leave rngs.*got rngs=Rngs\. Leave it out",
        LayerSpec(nnx.Linear, 3, 3, rngs=nnx.Rngs(0)),
    ),
    (
        r"LayerSpec\(Sequential, \.\.\.\).*got a Linear among its arguments\. Build it",
        LayerSpec(nnx.Sequential, nnx.Linear(3, 3, rngs=nnx.Rngs(0))),
    ),
    (r"method __call__\(self, inputs\), but got _NoCall.*Define it", LayerSpec(_NoCall)),
]
WRITES = {
    **dict.fromkeys((_Clips, _ClipsInTraining, _ClipsInJit, _Replaces), "linear.kernel"),
    **{_Updates: "linear.bias", _MakesLater: "later", _NormsWeights: "norm.layer_instance.kernel"},
}


def test_refused() -> None:
    table = [(words, partial(PipelineModule, [spec], num_stages=1)) for words, spec in SPECS]
    check_refused(LayerError, table)


def test_a_call_that_writes_a_parameter_is_refused() -> None:
    table = [
        (
            rf"layer {module.__name__} must leave its param.*a call that writes '{name}'",
            partial(PipelineModule([LayerSpec(module)], num_stages=1).trace, X),
        )
        for module, name in WRITES.items()
    ]
    check_refused(LayerError, table)
