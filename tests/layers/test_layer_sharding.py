"""How variables are sharded over automatic axes: Flax's metadata and the model's rules."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import check_refused
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxpipe import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from jaxpipe.errors import LayerError
from jaxpipe.layers import VocabEmbed, layer_signatures
from jaxpipe.layers._sharding import with_fsdp

X = np.ones((2, 4), np.float32)
KEY = jax.random.key(0)
TOPOLOGY = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
MESH = AbstractMesh(
    (1, 2, 2, 2), ("stage", "data", "model", "expert"), axis_types=(AxisType.Auto,) * 4
)
P = PartitionSpec
lecun = nn.initializers.lecun_normal()


def _dense(*names: Any, features: int = 8) -> nn.Module:
    return nn.Dense(features, use_bias=False, kernel_init=nn.with_partitioning(lecun, names))


def _logical(*names: Any, features: int = 8, rules: Any = None) -> nn.Module:
    return nn.Dense(
        features,
        use_bias=False,
        kernel_init=nn.with_logical_partitioning(lecun, names, rules=rules),
    )


class _NNXDense(nnx.Module):
    def __init__(self, *names: Any, local: Any = None, rngs: nnx.Rngs) -> None:
        more = {} if local is None else {"sharding_rules": local}
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names, **more)
        self.linear = nnx.Linear(4, 8, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def _nnx(*names: Any, local: Any = None) -> LayerSpec:
    return LayerSpec(_NNXDense, *names, local=local)


def _specs(layer: Any, rules: Any = None, mesh: AbstractMesh = MESH) -> list[PartitionSpec]:
    topology = ProcessTopology(["pipe", *mesh.axis_names[1:]], [1, *mesh.axis_sizes[1:]])
    model = PipelineModule([layer], topology=topology, sharding_rules=rules)
    specs = model.trace(X, mesh=mesh).param_specs[0]
    assert jax.tree.map(jnp.shape, jax.tree.leaves(model.init(KEY, X))) == [(4, 8)]
    return list(specs.values())


@pytest.mark.filterwarnings("ignore:.* must be whole on each replica")
@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    sweep(
        7,
        [
            (("expert", "model"), None, P("expert", "model")),
            ((None, ("expert", "model")), None, P(None, ("expert", "model"))),
            ((None, ("data", "model")), None, P(None, "model")),
            (("data", None), None, None),
            (
                ("embed", "mlp"),
                (("embed", "expert"), ("mlp", ("data", "model"))),
                P("expert", "model"),
            ),
            (("embed", "mlp"), (("embed", "data"), ("mlp", "pipe")), None),
            (
                ("embed", "mlp"),
                (("mlp", "model"), ("embed", "model"), ("embed", "expert")),
                P("expert", "model"),
            ),
            ((None, "model"), None, P(None, "model")),
            (("model",), None, P("model", None)),
            (("data", "model"), None, P(None, "model")),
            (("embed", "mlp"), (("embed", None), ("mlp", "model")), P(None, "model")),
            (
                (None, ("embed", "mlp")),
                (("embed", "expert"), ("mlp", "model")),
                P(None, ("expert", "model")),
            ),
            (
                ("embed", "mlp"),
                (("embed", None), ("mlp", "model"), ("mlp", "expert")),
                P(None, "model"),
            ),
            (("model", "mlp"), (("model", "expert"), ("mlp", "model")), P("expert", "model")),
        ],
        unpack=True,
    ),
)
@pytest.mark.parametrize("make", [_dense, _logical, _nnx])
def test_metadata_and_rules(
    make: Any, names: Sequence[Any], rules: Any, spec: PartitionSpec | None
) -> None:
    assert _specs(make(*names), rules) == ([] if spec is None else [spec])


def test_weights_that_name_the_axis_of_replicas() -> None:
    layers = [_dense("data", "model"), _dense(("data", "model"), None)]
    match = (
        r"'kernel' of layer 0_Dense and 1 further weights must be whole on each replica, but got "
        r"'data' .*rules=\("
    )
    with pytest.warns(UserWarning, match=match):
        PipelineModule(layers, topology=TOPOLOGY).trace(X, mesh=MESH)
    for place in ("expert", None):
        assert _specs(layers[0], (("data", place),)) == [P(place, "model")]


def test_logical_names_without_a_rule_mean_nothing() -> None:
    assert _specs(_logical("embed", "mlp"), (("mlp", "model"),)) == [P(None, "model")]
    assert _specs(_logical("embed", "mlp")) == []


class _Attention(nn.Module):
    """Flax makes its kernels flat and then reshapes them."""

    names: tuple[str | None, ...]
    spec: PartitionSpec | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.spec is None else jax.lax.with_sharding_constraint(x, self.spec)
        init = nn.with_logical_partitioning(lecun, self.names)
        return nn.MultiHeadDotProductAttention(
            num_heads=2, kernel_init=init, out_kernel_init=lecun
        )(x[None])[0]


@pytest.mark.parametrize("spec", sweep(1, [P(None, "model"), None]))
def test_names_of_a_variable_that_is_made_in_another_shape(spec: PartitionSpec | None) -> None:
    """As in any call, Flax traces the initialiser in `apply` too."""
    layer = _Attention(("embed", "heads", "kv"), spec)
    model = PipelineModule([layer], topology=TOPOLOGY, sharding_rules=(("heads", "model"),))
    found = model.trace(X, mesh=MESH).param_specs[0]
    assert set(found.values()) == {P(None, "model", None)}
    assert len(found) == 3
    model.apply(model.init(KEY, X), X)
    stages = PipelineModule(
        [_Attention(("embed", "heads", "kv"))], num_stages=1, sharding_rules=(("heads", "model"),)
    )
    stages.apply(stages.init(KEY, X), X)


@pytest.mark.filterwarnings("ignore:.* must be whole on each replica")
@pytest.mark.parametrize("topology", [TOPOLOGY, None])
def test_manual_axes_in_such_a_variable(topology: Any) -> None:
    init = nn.with_partitioning(lecun, ("data", "model"))
    settings = {"num_stages": 1} if topology is None else {"topology": topology}
    model = PipelineModule([nn.DenseGeneral((4, 2), kernel_init=init)], **settings)
    specs = model.trace(X, mesh=None if topology is None else MESH).param_specs
    assert specs == (({} if topology is None else {("kernel",): P(None, "model", None)}),)
    model.apply(model.init(KEY, X), X)


class _Own(nn.Module):
    """Metadata of a weight and a constraint by the name of an axis."""

    names: tuple[str | None, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(_dense(*self.names)(x), P(None, "model"))


@pytest.mark.filterwarnings("ignore:.* must be whole on each replica")
def test_names_beside_constraints() -> None:
    for names, rules in ((("data", "model"), None), (("embed", "model"), (("embed", None),))):
        model = PipelineModule([_Own(names)], topology=TOPOLOGY, sharding_rules=rules)
        assert [*model.trace(X, mesh=MESH).param_specs[0].values()] == [P(None, "model")]
        model.apply(model.init(KEY, X), X)
    with pytest.raises(
        LayerError, match=r"got: Resource axis: embed of P\('embed', 'model'\) is not found in mesh"
    ):
        PipelineModule([_Own(("embed", "model"))], topology=TOPOLOGY).trace(X, mesh=MESH)


@pytest.mark.parametrize("make", [_logical, _nnx])
def test_a_variable_may_have_rules_of_its_own(make: Any) -> None:
    key = "rules" if make is _logical else "local"
    assert _specs(make("embed", "mlp", **{key: (("embed", None), ("mlp", "model"))})) == [
        P(None, "model")
    ]


def test_axes_of_length_one_are_axes_like_others() -> None:
    mesh = AbstractMesh((1, 1, 1), ("stage", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    assert _specs(_dense(None, "model"), mesh=mesh) == [P(None, "model")]


class _Norm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_partitioning(lambda shape: jnp.zeros(shape), ("model",))
        mean = self.variable("stats", "mean", init, x.shape[1:])
        return x - mean.value[None]


def test_collections_are_sharded_alike() -> None:
    trace = PipelineModule([_Norm()], topology=TOPOLOGY).trace(X, mesh=MESH)
    assert trace.collection_specs == ({("stats", "mean"): P("model")},)
    assert trace.param_specs == ({},)


def test_tied_weights_are_sharded_as_their_first_layer_says() -> None:
    first, second = (
        nn.with_partitioning(lecun, names) for names in ((None, "model"), ("model", None))
    )
    layers = [
        TiedLayerSpec("w", nn.Dense, 4, kernel_init=first, tied_weight_attr="kernel"),
        TiedLayerSpec("w", nn.Dense, 4, kernel_init=second, tied_weight_attr="kernel"),
    ]
    trace = PipelineModule(layers, topology=TOPOLOGY).trace(X, mesh=MESH)
    assert trace.tree_specs() == {("tied", "w", "kernel"): P(None, "model")}
    assert trace.param_specs == ({("kernel",): P(None, "model")},) * 2


def test_a_vocabulary_over_stages_may_be_sharded_along_its_other_dim() -> None:
    class Embed(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            init = nn.with_partitioning(lecun, ("stage", "model"))
            return self.param("table", init, (8, 4))[ids.astype(int)]

    trace = PipelineModule([Embed()], topology=TOPOLOGY).trace(X, mesh=MESH)
    assert trace.param_specs == ({("table",): P(None, "model")},)
    assert trace.stage_dims == ({("table",): 0},)
    trace = PipelineModule([VocabEmbed(8, 4)], topology=TOPOLOGY).trace(X.astype(int), mesh=MESH)
    assert (trace.param_specs, trace.stage_dims) == (({},), ({("embedding",): 0},))


def test_layers_that_are_sharded_differently_are_not_alike() -> None:
    layers = [
        _dense(None, "model", features=4),
        _dense(None, "model", features=4),
        _dense("model", features=4),
    ]
    model = PipelineModule(layers, topology=TOPOLOGY)
    first, second, third = layer_signatures(model.layers, model.trace(X, mesh=MESH))
    assert first == second != third


def test_rules_stay_with_the_module() -> None:
    model = PipelineModule(
        [_dense()], topology=TOPOLOGY, sharding_rules=[["mlp", ["model"]], ("embed", None)]
    )
    assert model.sharding_rules == (("mlp", ("model",)), ("embed", None))
    assert model.replace(base_seed=3).sharding_rules == model.sharding_rules
    assert model.replace(sharding_rules=None).sharding_rules == ()


@pytest.mark.parametrize("make", [_dense, _nnx])
def test_a_name_that_is_neither_an_axis_nor_ruled(make: Any) -> None:
    match = (
        r"kernel' of layer 0_\w+ must be sharded over axes of the mesh, but got 'fsdp' in its "
        r"partition metadata \('fsdp', 'model'\) for a mesh with the axes 'stage', 'data', "
        r"'model'. Name the axis in the topology, or map the name to one: "
        r"sharding_rules=\(\('fsdp', None\),\)"
    )
    model = PipelineModule([make("fsdp", "model")], topology=TOPOLOGY)
    for call in (lambda: model.trace(X), lambda: model.init(KEY, X)):
        with pytest.raises(LayerError, match=match):
            call()
    assert model.replace(sharding_rules=(("fsdp", None),)).trace(X).param_specs[0].popitem()[
        1
    ] == P(None, "model")
    stages = PipelineModule([make("fsdp", "model")], num_stages=1)
    assert stages.trace(X).param_specs == ({},)
    stages.init(KEY, X)


SURPLUS = nn.Dense(8, bias_init=nn.with_partitioning(nn.initializers.zeros, (None, "model")))
TENSOR = (("mlp", ("model", "tensor")),)
REFUSED: list[tuple[str, Any, Any]] = [
    *(
        (rf"'kernel' of layer 0_Dense must .* along dims .* but got size {words}", layer, None)
        for layer, words in (
            (
                _dense(None, "model", features=7),
                r"7 at dim 1 over model=2\. Make it 6 or 8, or leave the axis out of",
            ),
            (
                _dense(None, "model", features=1),
                r"1 at dim 1 over model=2\. Make it 2, or leave the axis out of its",
            ),
            (
                _dense(None, ("expert", "model"), features=6),
                r"6 at dim 1 over expert=2 x model=2\. Make it 4 or 8",
            ),
        )
    ),
    *(
        (
            rf"kernel' of layer 0_\w+ must .* along one dim, but got {name!r} at two in .* "
            rf"{metadata}\. Leave {name!r}",
            *(layer, rules),
        )
        for layer, rules, name, metadata in (
            (_dense("model", "model"), None, "model", r"\('model', 'model'\)"),
            (_logical("mlp", "mlp"), (("mlp", "model"),), "mlp", r"\('mlp', 'mlp'\)"),
            (
                *(_dense("model", ("expert", "model")), None, "model"),
                r"\('model', \('expert', 'model'\)\)",
            ),
            (_nnx("model", "model"), None, "model", r"\('model', 'model'\)"),
            (
                *(_dense("model", ("mlp", "x")), (("mlp", "model"), ("x", None)), "model"),
                r"\('model', \('mlp', 'x'\)\)",
            ),
            (_dense("stage", "stage"), None, "stage", r"\('stage', 'stage'\)"),
        )
    ),
]
UNMAPPED: list[tuple[str, Any, Any]] = [
    (
        r"'bias' of layer .* each of its 1 dims .* \(None, 'model'\)\. Leave out the surplus",
        *(SURPLUS, None),
    ),
    (
        r"must map to axes of the mesh, but got \('mlp', \('model', 'tensor'\)\) for a mesh with "
        r"the axes 'stage', 'data', 'model'\. Name 'tensor' in the topology, or map 'mlp' to",
        *(_logical("embed", "mlp"), TENSOR),
    ),
    (
        r"but got \('mlp', 'tensor'\).* Name 'tensor' in the topology",
        *(_logical("embed", "mlp", rules=(("mlp", "tensor"),)), None),
    ),
]


def test_refused() -> None:
    for rows, mesh in ((REFUSED, MESH), (UNMAPPED, None)):
        for words, layer, rules in rows:
            model = PipelineModule([layer], topology=TOPOLOGY, sharding_rules=rules)
            check_refused(LayerError, [(words, partial(model.trace, X, mesh=mesh))])


def test_rules_without_a_topology() -> None:
    model = PipelineModule([_logical("embed", "mlp")], num_stages=1, sharding_rules=TENSOR)
    assert model.trace(X).param_specs == ({},)


def _in_logical(x: jax.Array) -> jax.Array:
    return nn.with_logical_constraint(x, ("batch", "hidden"))


def _in_mpl(x: jax.Array) -> jax.Array:
    return nn.with_logical_constraint(x, ("mpl", None))


UNUSED: list[Any] = [
    (
        [],
        [("hidden", "model")],
        "'hidden', but no weight and no constraint of a layer has such a logical name. Corr",
    ),
    ([_in_logical], [("other", None)], None),
    ([_in_logical], [("hidden", "model")], None),
    ([_in_logical], [("hidden", "model"), ("hidden", "expert")], None),
    # What is like a weight's name may be that of a constraint, where the weight's has a rule of its
    # own.
    ([_in_mpl], [("mpl", "model")], None),
    ([_in_mpl, _logical("mlp", "wide", features=12)], [("mpl", "model"), ("wide", "expert")], None),
    (
        [_in_mpl, _logical("mlp", "wide", features=12)],
        [("mpl", "model"), ("wid", "model")],
        "'wid' .did you mean 'wide'",
    ),
]


@pytest.mark.parametrize(("layers", "rules", "match"), UNUSED)
def test_a_rule_that_nothing_uses_is_warned_of_once(
    layers: Any, rules: Any, match: str | None
) -> None:
    rules = (("mlp", "model"), ("batch", "data"), *rules)
    model = PipelineModule(
        [_logical("embed", "mlp"), *layers], topology=TOPOLOGY, sharding_rules=rules
    )
    with pytest.warns(UserWarning, match=match) if match else contextlib.nullcontext():
        model.trace(X, mesh=MESH)
    model.replace(base_seed=3).trace(X, mesh=MESH)


FSDP_MESH = AbstractMesh(
    (2, 2, 4, 2), ("stage", "data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 4
)


@pytest.mark.parametrize(
    ("shape", "spec", "taken", "expected"),
    [
        ((8, 16), None, None, P(None, "fsdp")),
        ((16, 8), None, None, P("fsdp", None)),
        ((2, 3, 12), None, None, P(None, None, "fsdp")),
        # The first of equal dims.
        ((8, 8), None, None, P("fsdp", None)),
        ((3, 8, 8), None, None, P(None, "fsdp", None)),
        # The largest dim that is divided, not the largest.
        ((18, 8), None, None, P(None, "fsdp")),
        ((6, 6), None, None, None),
        # Dims that other axes divide already count with one place's share, and keep their axes.
        ((8, 12), P(None, "model"), None, P("fsdp", "model")),
        ((8, 24), P(None, "model"), None, P(None, ("model", "fsdp"))),
        ((8, 16), P(None, "model"), None, P("fsdp", "model")),
        ((3, 16), P(None, ("model",)), None, P(None, ("model", "fsdp"))),
        ((3, 12), P(None, "model"), None, P(None, "model")),
        # Metadata wins, on whichever dim.
        ((8, 16), P("fsdp", None), None, P("fsdp", None)),
        ((8, 16), P(("model", "fsdp"), None), None, P(("model", "fsdp"), None)),
        # Vectors and scalars stay whole.
        ((1024,), None, None, None),
        ((1024,), P("model"), None, P("model")),
        ((), None, None, None),
        # Not the dim that is split over the stages.
        ((64, 8), None, 0, P(None, "fsdp")),
        ((64, 6), None, 0, None),
    ],
)
def test_weights_are_divided_over_fsdp_along_their_largest_dim(
    shape: tuple[int, ...],
    spec: PartitionSpec | None,
    taken: int | None,
    expected: PartitionSpec | None,
) -> None:
    path, other = ("kernel",), ("other",)
    given = {other: P("model")} | ({} if spec is None else {path: spec})
    dims = {} if taken is None else {path: taken}
    found = with_fsdp({path: jax.ShapeDtypeStruct(shape, jnp.float32)}, given, dims, FSDP_MESH)
    assert found == {other: P("model")} | ({} if expected is None else {path: expected})


def test_a_mesh_without_fsdp_divides_nothing() -> None:
    params, specs = (
        {("kernel",): jax.ShapeDtypeStruct((8, 8), jnp.float32)},
        {("bias",): P("model")},
    )
    assert with_fsdp(params, specs, {}, MESH) == specs


class _Table(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.variable("stats", "table", lambda: jnp.zeros((12, 16))).value


def test_what_a_trace_says_of_weights_on_a_mesh_with_fsdp() -> None:
    """Collections stay whole, for they are no weights."""
    topology = ProcessTopology(["pipe", "data", "fsdp"], [2, 1, 4])
    mesh = AbstractMesh((2, 1, 4), ("stage", "data", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    layers = [VocabEmbed(64, 8), _dense("fsdp", features=16), nn.Dense(12), _Table()]
    trace = PipelineModule(layers, topology=topology).trace(X.astype(int), mesh=mesh)
    assert trace.stage_dims[0] == {("embedding",): 0}
    assert trace.param_specs == (
        {("embedding",): P(None, "fsdp")},
        {("kernel",): P("fsdp", None)},
        {("kernel",): P("fsdp", None)},
        {},
    )
    assert trace.collection_specs == ({},) * 4


def test_layers_whose_metadata_divides_them_otherwise_are_not_alike() -> None:
    mesh = AbstractMesh((1, 1, 2), ("stage", "data", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    layers = [
        nn.Dense(4, use_bias=False),
        _dense("fsdp", features=4),
        _dense(None, "fsdp", features=4),
    ]
    model = PipelineModule(layers, topology=ProcessTopology(["pipe", "data", "fsdp"], [1, 1, 2]))
    first, second, third = layer_signatures(model.layers, model.trace(X, mesh=mesh))
    assert first == second != third
