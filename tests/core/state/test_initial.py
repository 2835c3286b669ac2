"""Initial parameters: the module's own, bit by bit, made on the devices that keep them."""

import logging
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _oracle import Case, sequential_model
from _settings import make_settings
from _stages import struct

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.core.state import HostRows, Layout, StageInit
from jaxpipe.core.state._init import _block, _shard_kinds_of_rows
from jaxpipe.core.state._zero import ByElements, ByLeaves, Replicated
from jaxpipe.errors import LayerError
from jaxpipe.topology import make_pipeline_mesh

SIZE = 300
ADAM, LAMB = optax.adam(0.1), optax.lamb(0.1)


class Table(nn.Module):
    """Starts from a table computed with numpy."""

    scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def start(key: jax.Array) -> jax.Array:
            return jnp.asarray(np.sin(np.arange(SIZE) * self.scale).astype(np.float32))

        return x * self.param("table", start).reshape(1, SIZE)


def build(layers: list[Any], stages: int = 2, data: int = 1) -> tuple[Pipeline, Any]:
    module = PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
    )
    x = np.ones((2 * data, SIZE), np.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, data))
    pipeline = Pipeline(module, optax.adam(0.1), mesh, (x, x), 2)
    return pipeline, jax.device_get(module.init(jax.random.key(module.base_seed), x[:2]))


@pytest.mark.parametrize("stages", sweep(1, [2, 1, 4]))
def test_initialisers_that_hold_constants(stages: int) -> None:
    pipeline, wanted = build([LayerSpec(Table, float(i)) for i in range(8)], stages)
    found = pipeline.params_tree(pipeline.init().params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_given_tree_is_taken_and_found_again() -> None:
    pipeline, tree = build(
        [LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE), nn.Dense(SIZE)], 2, 2
    )
    given = jax.tree.map(lambda x: x + 1.0, tree)
    state = pipeline.states.init_from(given)
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), given)
    state = pipeline.states.replace(state, params=tree)
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), tree)
    assert jax.tree.structure(state) == jax.tree.structure(pipeline.states.struct)
    for leaf, like in zip(
        jax.tree.leaves(state), jax.tree.leaves(pipeline.states.struct), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding == like.sharding


def test_trees_of_other_dtypes_are_converted() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    for dtype in (np.float64, np.float16, jnp.bfloat16):
        state = pipeline.states.init_from(jax.tree.map(lambda x, d=dtype: np.asarray(x, d), tree))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


def spoiled(tree: Any, name: str) -> Any:
    layers = {key: {**value} for key, value in tree["layers"].items()}
    if name == "missing":
        del layers["0_Dense"]["kernel"]
    elif name == "unexpected":
        layers["0_Dense"]["extra"] = np.zeros(3, np.float32)
    else:
        layers["1_Dense"]["bias"] = np.zeros((2, 2), np.float32)
    return {"layers": layers}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "missing",
            r"got 1 difference: missing layers/0_Dense/kernel\. Pass a tree as "
            r"PipelineModule\.init",
        ),
        ("unexpected", r"got 1 difference: unexpected layers/0_Dense/extra\. Pass a tree"),
        ("shape", r"layers/1_Dense/bias is float32\[2, 2\], not float32\[300\]\. Pass a tree"),
    ],
)
def test_other_trees_are_refused(name: str, match: str) -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    with pytest.raises(LayerError, match=match):
        pipeline.states.init_from(spoiled(tree, name))
    state = pipeline.init()
    with pytest.raises(LayerError, match=match):
        pipeline.states.replace(state, params=spoiled(tree, name))


def test_parameters_in_boxes_of_flax_are_taken() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), tree)
    states = [pipeline.states.init_from(given) for given in (tree, boxed)]
    jax.tree.map(
        np.testing.assert_array_equal, *(pipeline.params_tree(state.params) for state in states)
    )


def test_complex_values_for_real_parameters_are_refused() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    tree["layers"]["0_Dense"]["bias"] = np.zeros(SIZE, np.complex64)
    with pytest.raises(
        LayerError,
        match=rf"layers/0_Dense/bias is complex64\[{SIZE}\], not float32\[{SIZE}\]\. Pass",
    ):
        pipeline.states.init_from(tree)


def test_many_differences_are_counted() -> None:
    pipeline, _ = build([LayerSpec(nn.Dense, SIZE) for _ in range(6)])
    with pytest.raises(LayerError, match=r"got 12 differences: .*; and 4 more\. Pass a tree"):
        pipeline.states.init_from({})


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the functions that XLA compiles while the test runs."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def refuse(*args: Any) -> None:
    raise AssertionError("values lie in host memory")


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="split_tied", data=2, optimizer=ADAM, settings={"zero_stage": 1}),
            Case(model="norm_reports", data=2, optimizer=LAMB, settings={"zero_stage": 1}),
            Case(model="tied_many", stages=4, data=2, optimizer=ADAM, settings={"zero_stage": 3}),
            Case(model="nnx", optimizer=ADAM, schedule="1f1b-v"),
            Case(model="side", stages=1, optimizer=ADAM),
            Case(model="mixed", stages=4, optimizer=ADAM),
        ],
    ),
    ids=str,
)
def test_values_are_those_of_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, wanted = case.pipeline(), sequential_model(case.model)
    monkeypatch.setattr(HostRows, "__init__", refuse)
    state = pipeline.init()
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), wanted.params)
    found = pipeline.states.collections_tree(state.collections)
    jax.tree.map(np.testing.assert_array_equal, found, dict(wanted.collections))


def test_alike_layers_are_compiled_once(compiled: list[str]) -> None:
    pipeline, wanted = build([LayerSpec(nn.Dense, SIZE) for _ in range(8)], stages=4, data=2)
    compiled.clear()
    state = pipeline.init()
    assert [compiled.count(f"jit({name})") for name in ("draw", "put")] == [1, 1]
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), wanted)


def test_stages_draw_side_by_side_one_layer_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as the layers of one stage.

    Leaves of one layer at a time lie beside the state.
    """
    events: list[str] = []
    run, wait = StageInit._run, jax.block_until_ready

    def watched_run(self: StageInit, *args: Any) -> None:
        run(self, *args)
        events.append("drawn")

    def watched_wait(tree: Any) -> Any:
        events.append("waited")
        return wait(tree)

    pipeline, _ = build([LayerSpec(nn.Dense, SIZE) for _ in range(8)], stages=4, data=2)
    monkeypatch.setattr(StageInit, "_run", watched_run)
    monkeypatch.setattr(jax, "block_until_ready", watched_wait)
    pipeline.init()
    assert events == ["drawn", "waited"] * 2


class Mixed(nn.Module):
    """Starts from what only the host can make, in one way or another."""

    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def start(key: jax.Array) -> jax.Array:
            if self.how == "callback":
                return jax.pure_callback(
                    lambda: np.ones(SIZE, np.float32), jax.ShapeDtypeStruct((SIZE,), jnp.float32)
                )
            return jax.random.normal(jax.random.key(3, impl="rbg"), (SIZE,))

        return x * self.param("scale", start).reshape(1, SIZE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "fault", "more"),
    [
        ([LayerSpec(Table, 0.5)], "holds arrays", ""),
        ([LayerSpec(Mixed, "callback")] * 2, "calls Python back", " and 1 more layer"),
        (
            [LayerSpec(Mixed, "rbg")] * 3,
            "draws with another generator than threefry",
            " and 2 more layers",
        ),
    ],
)
def test_what_only_the_host_can_make_is_made_there(
    layers: Any, fault: str, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxpipe")
    pipeline, wanted = build(
        [LayerSpec(nn.Dense, SIZE), *layers, LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)]
    )
    found = pipeline.params_tree(pipeline.init().params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    lines = [r.getMessage() for r in caplog.records if "host memory" in r.getMessage()]
    name = f"1_{layers[0].typename.__name__}"
    assert lines == [f"params of {name}{more} are made in host memory: the initialiser {fault}"]


class Normed(nn.Module):
    """Starts from rows of length 1: sums, whose order would depend on how they are sharded."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def start(key: jax.Array) -> jax.Array:
            kernel = jax.random.normal(key, (SIZE, SIZE))
            return kernel / jnp.linalg.norm(kernel, axis=1, keepdims=True)

        scale = self.param("scale", nn.initializers.orthogonal(), (SIZE, SIZE))
        return x @ self.param("kernel", start) @ scale


def test_sums_of_an_initialiser_do_not_depend_on_shards() -> None:
    module = PipelineModule(
        [LayerSpec(Normed) for _ in range(2)],
        num_stages=2,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
    )
    x = np.ones((4, SIZE), np.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 2))
    pipeline = Pipeline(module, ADAM, mesh, (x, x), 2, make_settings(zero_stage=3))
    wanted = jax.device_get(module.init(jax.random.key(module.base_seed), x[:2]))
    jax.tree.map(
        np.testing.assert_array_equal, pipeline.params_tree(pipeline.init().params), wanted
    )


def test_each_row_is_of_the_shard_of_its_stage_and_replica() -> None:
    layout = Layout([{"a": struct(2), "b": struct(3)}, {"a": struct(2), "c": struct(5)}])
    each = [Replicated(layout), ByElements(layout, 2, {}), ByLeaves(layout, 2, ())]
    found = [_shard_kinds_of_rows(sharding) for sharding in each]
    # Whole, a stage's leaves lie in one row. Pieces are alike on all replicas, whole leaves are
    # not.
    assert found == [[0, 1], [0, 0, 1, 1], [0, 1, 2, 3]]


def test_blocks_are_cut_off_side_by_side() -> None:
    leaf = jnp.arange(12).reshape(2, 6)
    assert [_block(leaf, 1, jnp.int32(i), 3).tolist() for i in range(3)] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert _block(leaf, 0, jnp.int32(1), 2).tolist() == [[6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("optimizer", sweep(1, [ADAM, LAMB]), ids=["by elements", "by leaves"])
def test_a_stage_with_more_layers_draws_alone_and_each_replica_keeps_its_shard(
    optimizer: optax.GradientTransformation,
) -> None:
    """One of three alike layers is on the second stage, after another one.

    LAMB wants whole leaves.
    """
    normal = nn.initializers.normal()
    one, two, three = (
        LayerSpec(nn.Dense, 4, kernel_init=normal, bias_init=normal) for _ in range(3)
    )
    layers = [one, two, jnp.tanh, LayerSpec(nn.Dense, 4, use_bias=False), three]
    module = PipelineModule(
        layers,
        num_stages=2,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method=[0, 3, 5],
    )
    x = np.ones((4, 4), np.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 2))
    pipeline = Pipeline(module, optimizer, mesh, (x, x), 2, make_settings(zero_stage=1))
    wanted = jax.device_get(module.init(jax.random.key(module.base_seed), x[:2]))
    jax.tree.map(
        np.testing.assert_array_equal, pipeline.params_tree(pipeline.init().params), wanted
    )
