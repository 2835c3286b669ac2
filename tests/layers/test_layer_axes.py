"""Layers on a mesh's manual and automatic axes, traced and on one device."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import check_refused
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, ProcessTopology
from jaxpipe.errors import LayerError
from jaxpipe.layers import on_mesh
from jaxpipe.layers._axes import mesh_fault

X = np.arange(8, dtype=np.float32).reshape(2, 4) / 8
KEY = jax.random.key(0)
TOPOLOGY = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
MESH = AbstractMesh((1, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))
P = PartitionSpec


class _Block(nn.Module):
    """Columns, then rows; one constraint by names of axes, one by logical names."""

    hidden: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        columns = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        rows = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        heads = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp", None))
        x = (
            x
            + nn.MultiHeadDotProductAttention(
                2, kernel_init=heads, out_kernel_init=rows, name="attention"
            )(x[None])[0]
        )
        h = nn.with_logical_constraint(
            nn.Dense(self.hidden, kernel_init=columns, name="up")(x), ("batch", "mlp")
        )
        h = nn.Dropout(0.5, deterministic=not train)(
            jax.lax.with_sharding_constraint(jnp.tanh(h), P(None, "model"))
        )
        return x + nn.Dense(x.shape[-1], kernel_init=rows, name="down")(h)


class _PlainBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x[None])[0]
        h = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(nn.Dense(8, name="up")(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h)


class _NNXBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(4, 8, kernel_init=columns, rngs=rngs)
        scales = nnx.with_partitioning(nnx.initializers.ones, ("model",))
        self.norm = nnx.BatchNorm(8, axis_name="data", scale_init=scales, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nn.with_logical_constraint(self.norm(self.up(x)), ("batch", "mlp")))


def _own_shard_map(x: jax.Array) -> jax.Array:
    """An explicit collective."""
    spec = P(None, "model")

    def add_up(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x.sum(), "model") + 0 * x

    return x + jax.shard_map(add_up, in_specs=spec, out_specs=spec, axis_names={"model"})(x)


def _over_replicas(x: jax.Array) -> jax.Array:
    return x - jax.lax.pmean(x, "data")


def _module(*layers: Any, **settings: Any) -> PipelineModule:
    settings = {"topology": TOPOLOGY, "sharding_rules": RULES, **settings}
    return PipelineModule(layers, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), **settings)


def _constraints(function: Callable[..., Any], *args: Any) -> list[PartitionSpec]:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return [
        eqn.params["sharding"].spec
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
    ]


def test_a_trace_sees_whole_shapes_and_constraints_by_axis_and_by_rule() -> None:
    model = _module(_Block(), LayerSpec(_NNXBlock))
    trace = model.trace(X, mesh=MESH)
    assert trace.mesh == MESH
    assert trace.params[0]["up"]["kernel"].shape == (4, 8)

    def run(views: Any, collections: Any, x: jax.Array) -> jax.Array:
        return model.run_layers([0, 1], views, train=False)(x, None, {}, collections)[0]

    found = trace.on_mesh(lambda: _constraints(run, trace.params, trace.collections, X))
    assert found == [P(None, "model"), P(None, "model"), P(None, "model")]


def test_rules_are_in_force_in_what_a_trace_runs() -> None:
    trace = _module(_Block()).trace(X, mesh=MESH)
    assert trace.on_mesh(nn.get_logical_axis_rules) == (
        ("batch", None),
        ("embed", None),
        ("mlp", "model"),
    )
    assert nn.get_logical_axis_rules() == ()


def test_a_mesh_that_is_around_stays() -> None:
    def inner() -> tuple[Any, ...]:
        return jax.sharding.get_abstract_mesh().manual_axes, jax.lax.axis_size("data")

    assert on_mesh(MESH, lambda: on_mesh(MESH, inner)) == (("stage", "data"), 2)


@pytest.mark.slow
def test_what_is_traced_runs_on_the_devices_of_the_mesh() -> None:
    mesh = jax.make_mesh((1, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    model = _module(_Block(), _own_shard_map)
    params = model.init(KEY, X)
    trace = model.trace(X[:1], mesh=mesh.abstract_mesh)
    views = (params["layers"]["0__Block"], {})

    def run(views: Any, x: jax.Array) -> jax.Array:
        return model.run_layers([0, 1], views, train=False)(x, None, {}, [{}, {}])[0]

    closed = trace.on_mesh(lambda: jax.make_jaxpr(run)(trace.params, X[:1]))

    def step(x: jax.Array, views: Any) -> jax.Array:
        return jaxpr_as_fun(closed)(*jax.tree.leaves((views, x)))[0]

    spec = {"mesh": mesh, "axis_names": {"stage", "data"}, "check_vma": False}
    found = jax.jit(jax.shard_map(step, in_specs=(P("data"), P()), out_specs=P("data"), **spec))(
        X, views
    )
    wanted = jnp.concatenate([model.apply(params, x) for x in (X[:1], X[1:])])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("train", sweep(1, [True, False]))
@pytest.mark.parametrize(
    "call",
    sweep(
        3,
        [
            pytest.param(
                lambda f, x: jax.jit(jax.vmap(f))(jnp.stack([x, 2 * x])), id="jit of vmap"
            ),
            pytest.param(lambda f, x: f(x), id="eagerly", marks=pytest.mark.slow),
            pytest.param(
                lambda f, x: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.stack([x, 2 * x])),
                id="scan",
                marks=pytest.mark.slow,
            ),
            pytest.param(lambda f, x: jax.jit(f)(x), id="jit"),
            pytest.param(lambda f, x: jax.vmap(f)(jnp.stack([x, 2 * x])), id="vmap"),
        ],
    ),
)
def test_on_one_device_constraints_change_no_number(call: Callable[..., Any], train: bool) -> None:
    model, plain = _module(_Block()), _module(_PlainBlock(), sharding_rules=None)
    params, same = model.init(KEY, X), plain.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(same))

    def run(model: PipelineModule, params: Any) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return model.loss(model.apply(params, x, train=train, key=KEY if train else None), X)

        return call(lambda x: jax.value_and_grad(loss)(params, x), jnp.asarray(X))

    for ours, theirs in zip(
        jax.tree.leaves(run(model, params)), jax.tree.leaves(run(plain, same)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_on_one_device_with_collections_and_collectives() -> None:
    model = _module(LayerSpec(_NNXBlock), _over_replicas, _own_shard_map)
    params, collections = model.init(KEY, X), model.init_collections(KEY, X)
    _, changed, _ = model.call(params, collections, X, train=True)
    before, after = (jax.tree.leaves(tree) for tree in (collections, changed))
    assert [a.shape for a in before] == [a.shape for a in after]
    assert not np.array_equal(before[0], after[0])
    grads = jax.grad(lambda p: model.loss(model.call(p, collections, X)[0], X))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    np.testing.assert_allclose(_module(_own_shard_map).apply({}, X), X + X.sum(), rtol=1e-6)
    np.testing.assert_array_equal(_module(_over_replicas).apply({}, X), 0 * X)


def test_on_one_device_weights_may_lie_on_several() -> None:
    model = _module(_Block())
    params = model.init(KEY, X)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    there = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
    np.testing.assert_allclose(model.apply(there, X), model.apply(params, X), rtol=1e-6)


def test_on_one_device_parameters_and_gradients_add_up() -> None:
    model = _module(_Block())
    params = model.init(KEY, X)
    grads = jax.grad(lambda p: model.loss(model.apply(p, X), X))(params)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert model.loss(model.apply(moved, X), X) < model.loss(model.apply(params, X), X)
    assert not jax.tree.leaves(params)[0].committed


def test_a_loss_may_have_constraints() -> None:
    def loss_fn(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        outputs = nn.with_logical_constraint(outputs, ("batch", "mlp"))
        return jnp.mean((jax.lax.with_sharding_constraint(outputs, P(None, "model")) - labels) ** 2)

    model = _module(_Block()).replace(loss_fn=loss_fn)
    np.testing.assert_allclose(model.loss(X, 2 * X), np.mean(X**2), rtol=1e-6)
    trace = model.trace(X, mesh=MESH)
    assert trace.on_mesh(lambda: _constraints(model.loss, X, X)) == [P(None, "model")] * 2


def test_without_automatic_axes_nothing_is_compiled_and_annotations_mean_nothing() -> None:
    seen: list[type] = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(type(x))
        return nn.with_logical_constraint(x, ("batch", "mlp"))

    logical = nn.with_logical_partitioning(nn.initializers.ones, ("mlp", "model"))
    metadata = nn.with_partitioning(nn.initializers.ones, ("nowhere", "model"))
    layers = [nn.Dense(5, kernel_init=logical), nn.Dense(7, kernel_init=metadata), look]
    model = PipelineModule(layers, num_stages=1, sharding_rules=RULES)
    assert model.trace(X).param_specs == ({}, {}, {})
    params = model.init(KEY, X)
    seen.clear()
    model.apply(params, X)
    assert not issubclass(seen[0], jax.core.Tracer)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_axes", sweep(1, [("stage", "data", "model"), ("x",)]))
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_users_own_mesh_may_be_around(mesh_axes: tuple[str, ...], axis_type: AxisType) -> None:
    shape = (8,) if len(mesh_axes) == 1 else (2, 2, 2)
    model = PipelineModule(
        [nn.Dense(4), nn.DenseGeneral((2, 2)), lambda x: x.reshape(2, 4)], num_stages=1
    )
    wanted = model.apply(model.init(KEY, X), X)
    with jax.set_mesh(jax.make_mesh(shape, mesh_axes, axis_types=(axis_type,) * len(shape))):
        assert _module(_Block()).trace(X, mesh=MESH).tree_specs()
        x = jax.device_put(X, P(None, mesh_axes[-1]) if len(shape) == 3 else P())
        np.testing.assert_allclose(model.apply(model.init(KEY, X), x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_users_own_mesh_shards_an_annotated_model() -> None:
    model = _module(_Block())
    wanted = model.apply(model.init(KEY, X), X)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
        np.testing.assert_allclose(model.apply(model.init(KEY, X), X), wanted, rtol=1e-5, atol=1e-6)


def test_an_error_on_a_mesh_that_has_the_axes_is_not_about_the_mesh() -> None:
    def fails(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        raise ValueError("mine")

    model = _module(_Block()).replace(loss_fn=fails)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(LayerError, match=r"loss_fn must take .*: mine\."):
        model.loss(X, X)


class _AsksForTheAxis(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.size = jax.lax.axis_size("model")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _bare(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "model")


WHOLE = AbstractMesh((2, 2, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
STAGES = {"num_stages": 1, "topology": None}


def _constrain(x: jax.Array, axis: str) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, P(axis))


def _traced(layer: Any, mesh: Any = None, **settings: Any) -> Any:
    return functools.partial(_module(layer, sharding_rules=None, **settings).trace, X, mesh=mesh)


REFUSED = [
    *(
        (
            r"layer 0__bare must use no collectives over the axis 'model'.* but got: Found an "
            r"unbound axis name: model\. Say .* or open jax\.shard_map\(\.\.\., "
            r"axis_names=\{'model'\}\) around",
            call,
        )
        for call in (
            lambda: _module(_bare).trace(X),
            lambda: _module(_bare).init(KEY, X),
            lambda: _module(_bare).apply({}, X),
        )
    ),
    (
        "loss_fn must use no collectives over the axis 'model'.* or open jax.shard_",
        lambda: _module(_Block()).replace(loss_fn=lambda y, _: _bare(y.sum())).loss(X, X),
    ),
    *(
        (
            r"must use collectives over the axis 'data', .*, but got: .*unbound axis name: \w+\. "
            "Name .* open jax",
            call,
        )
        for settings in ({}, STAGES)
        for call in (
            _traced(lambda x: jax.lax.psum(x, "other"), **settings),
            functools.partial(_module, LayerSpec(_AsksForTheAxis), **settings),
        )
    ),
    *(
        (
            rf"layer 0_lambda must name in its sharding constraints .*{words}",
            _traced(lambda x, axis=axis: _constrain(x, axis), **settings),
        )
        for axis, settings, words in (
            ("data", {}, r"has 'model', .* but got: .*Leave out 'stage' and 'data', and"),
            (
                *("expert", {}),
                "has 'model', .* but got: Resource axis: expert .* a topology with every other",
            ),
            (
                *("model", STAGES),
                "has none, .* but got: .* every other axis, such as PipeModelDataParallelTop",
            ),
        )
    ),
    (
        r"layer 0_.* must .*sharding constraints automatic axes of the mesh, of which it has "
        r"'model', .* over 'data'\. Leave out",
        _traced(
            lambda x: (
                jax.lax.with_sharding_constraint(x, NamedSharding(WHOLE, P("data", "model"))) + 1
            ),
            WHOLE,
        ),
    ),
    (
        r"layer 0_.* must .*open jax\.shard_map on the mesh around it, .* Leave mesh= out .* "
        r"axis_names={'model'}\)\.",
        _traced(jax.shard_map(jnp.sin, mesh=WHOLE, in_specs=P("data"), out_specs=P("data")), WHOLE),
    ),
]


def test_refused() -> None:
    check_refused(LayerError, REFUSED)


@pytest.mark.parametrize(
    ("around", "layer", "text", "match"),
    [
        (None, lambda x: _constrain(x, "model"), "with_sharding_constraint", "constraints"),
        (MESH, lambda x: _constrain(x, "expert"), "Resource axis:", "constraints"),
        (
            MESH,
            jax.shard_map(jnp.sin, mesh=WHOLE, in_specs=P("data"), out_specs=P("data")),
            "mesh passed to shard_map",
            "open jax.shard_map on the mesh around",
        ),
        (MESH, _bare, "axis name: model", "no collectives over the axis 'model'"),
    ],
)
def test_what_jax_says_of_a_wrong_use_of_the_mesh(
    around: AbstractMesh | None, layer: Callable[..., Any], text: str, match: str
) -> None:
    """JAX has no classes for these errors, so that the texts decide which fault a layer has."""

    def trace() -> Any:
        return jax.eval_shape(layer, X)

    run = trace if around is None else functools.partial(on_mesh, around, trace)
    with pytest.raises((ValueError, RuntimeError, NameError), match=text) as caught:
        run()
    assert match in str(mesh_fault("layer 0_f", caught.value, ("model",)))


def test_an_error_of_another_kind_is_no_fault_of_the_mesh() -> None:
    assert mesh_fault("layer 0_f", ValueError("shapes do not match"), ("model",)) is None


def test_a_mesh_is_around_new_variables_only_if_a_layer_needs_one() -> None:
    layers = [nn.Dense(4), _Block(), lambda x: _constrain(x, "model")]
    assert PipelineModule(layers, topology=TOPOLOGY).trace(X, mesh=MESH).init_on_mesh == (
        False,
        True,
        False,
    )


def test_collectives_over_one_replica_beside_automatic_axes() -> None:
    def centred(x: jax.Array) -> jax.Array:
        return x - jax.lax.pmean(x, "data")

    def mesh(stages: int, data: int) -> AbstractMesh:
        return AbstractMesh(
            (stages, data, 2), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3
        )

    model = PipelineModule([centred], topology=TOPOLOGY)
    for lengths in ((1, 2), (2, 1)):
        model.trace(X, mesh=mesh(*lengths))
    with pytest.raises(
        LayerError,
        match="no collective over 'data' .* got one on a mesh of stage=1 x data=1 x model=2",
    ):
        model.trace(X, mesh=mesh(1, 1))


def test_a_topology_of_any_axes() -> None:
    topology = ProcessTopology(["pipe", "data", "expert", "model"], [1, 1, 2, 2])
    over_both = functools.partial(jax.lax.with_sharding_constraint, shardings=P("expert", "model"))
    model = _module(over_both, topology=topology, sharding_rules=None)
    assert model.trace(X).mesh.shape_tuple == (
        ("stage", 1),
        ("data", 1),
        ("expert", 1),
        ("model", 1),
    )
    np.testing.assert_array_equal(model.apply({}, X), X)
